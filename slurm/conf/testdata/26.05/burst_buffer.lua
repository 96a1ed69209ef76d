-- Written by Sluice for Slurm 26.05; changes are overwritten.
--
-- Every function is a call of sluice-hook, which asks sluiced. What
-- slurm_bb_job_process, slurm_bb_pools and slurm_bb_paths take, slurmctld
-- stands still: they answer within milliseconds whatever sluiced does. It runs
-- with the Lua versions that Slurm is built with (5.1 to 5.4).

local hook = "/usr/local/libexec/sluice/sluice-hook"
-- sluiced keeps the environment of each staged job here, in a file named by its id.
local environment = "/run/sluice/env/"
-- slurmctld keeps the scripts of its jobs here.
local state = "/var/spool/slurmctld"
-- Slurm 23.02 and newer pass uid, gid and job_info.
local long_arguments = true
-- Slurm 24.05 and newer call test_data_in and test_data_out until they are not busy.
local polls = true

-- quote makes any text one word of a POSIX shell.
local function quote(text)
	return "'" .. (string.gsub(tostring(text), "'", "'\\''")) .. "'"
end

-- number lets nothing but digits pass.
local function number(value)
	return string.match(tostring(value), "^%d+$") or "0"
end

-- text is an optional string, cut to what a command line can hold.
local function text(value, limit)
	if value == nil then
		return ""
	end
	return string.sub(tostring(value), 1, limit or 1024)
end

-- call runs sluice-hook and returns its status (ok, busy, error) and message;
-- a hook that cannot answer is the status nil. "exec" spares a second fork.
local function call(operation, options, arguments)
	local words = { "exec", quote(hook), "bb", operation }
	for name, value in pairs(options) do
		words[#words + 1] = quote("--" .. name .. "=" .. value)
	end
	if arguments then
		words[#words + 1] = "--"
		for _, a in ipairs(arguments) do
			words[#words + 1] = quote(a)
		end
	end
	local pipe, reason = io.popen(table.concat(words, " "), "r")
	if not pipe then
		slurm.log_error("sluice: %s: %s", operation, tostring(reason))
		return nil, "sluice-hook cannot be started"
	end
	local answer = pipe:read("*a") or ""
	pipe:close()
	local status, message = string.match(answer, "^(%l+)\n(.*)$")
	if status ~= "ok" and status ~= "busy" and status ~= "error" then
		slurm.log_error("sluice: %s: no answer from %s", operation, hook)
		return nil, "no answer from sluice-hook; its own message is in slurmctld's standard error"
	end
	return status, (string.gsub(message, "\n+$", ""))
end

-- run is call for the functions that succeed or fail.
local function run(operation, options)
	local status, message = call(operation, options)
	if status == "ok" or status == "busy" then
		return slurm.SUCCESS
	end
	return slurm.ERROR, message
end

-- poll is call for the functions that Slurm repeats while they are busy.
local function poll(operation, options)
	local status, message = call(operation, options)
	if status == "busy" then
		return slurm.SUCCESS, slurm.SLURM_BB_BUSY or "BUSY"
	elseif status == "ok" then
		return slurm.SUCCESS
	end
	return slurm.ERROR, message
end

-- job collects what every function knows of the job.
local function job(id, script, uid, gid, info)
	local options = { job = number(id) }
	if script then
		options.script = script
		options.state = state
	end
	if long_arguments then
		options.uid = number(uid)
		options.gid = number(gid)
		if info then
			options.name = text(info.name)
			options.account = text(info.account)
			options.partition = text(info.partition)
		end
	end
	return options
end

function slurm_bb_job_process(script, uid, gid, info)
	local options = { script = script }
	if long_arguments then
		options.uid = number(uid)
		options.gid = number(gid)
		if info then
			options.account = text(info.account)
		end
		-- The script's own name, for messages: the first word of the command.
		if info and info.batch_flag == 1 then
			local command = string.match(text(info.command, 4096), "^%S+")
			local file = command and string.match(command, "([%w%._-]+)$")
			if file then
				options.file = text(file, 64)
			end
		elseif info then
			options.interactive = "true"
		end
	end
	local status, message = call("job_process", options)
	if status == "error" then
		return slurm.ERROR, message
	end
	-- A hook that cannot answer refuses nothing: setup judges again.
	return slurm.SUCCESS
end

function slurm_bb_pools()
	return slurm.SUCCESS
end

function slurm_bb_setup(id, uid, gid, pool, size, script, info)
	local options = job(id, script, uid, gid, info)
	-- These two come in every version.
	options.uid = number(uid)
	options.gid = number(gid)
	return run("setup", options)
end

function slurm_bb_data_in(id, script, uid, gid, info)
	local options = job(id, script, uid, gid, info)
	options.wait = tostring(not polls)
	return run("data_in", options)
end

function slurm_bb_test_data_in(id, script, uid, gid, info)
	return poll("test_data_in", job(id, script, uid, gid, info))
end

-- Called only for a job that asks for a pool, and there is none.
function slurm_bb_real_size()
	return slurm.SUCCESS
end

function slurm_bb_paths(id, script, path_file, uid, gid, info)
	local variables
	local source = io.open(environment .. number(id), "r")
	if source then
		variables = source:read("*a")
		source:close()
	end
	if not variables then
		local status, message = call("paths", job(id, nil, uid, gid, info))
		if status ~= "ok" then
			return slurm.ERROR, message
		end
		variables = message .. "\n"
	end
	local target, reason = io.open(path_file, "w")
	if not target then
		-- Slurm wants the file in the job's own directory, which it makes for a
		-- job but not for the tasks of an array.
		call("path_directory", { file = path_file })
		target, reason = io.open(path_file, "w")
	end
	if not target then
		return slurm.ERROR, tostring(reason)
	end
	target:write(variables)
	if not target:close() then
		return slurm.ERROR, "cannot write the job's environment"
	end
	return slurm.SUCCESS
end

function slurm_bb_pre_run(id, script, uid, gid, info)
	local options = job(id, script, uid, gid, info)
	if long_arguments and info then
		options.nodes = text(info.nodes, 65536)
	end
	return run("pre_run", options)
end

function slurm_bb_post_run(id, script, uid, gid, info)
	return run("post_run", job(id, script, uid, gid, info))
end

function slurm_bb_data_out(id, script, uid, gid, info)
	local options = job(id, script, uid, gid, info)
	options.wait = tostring(not polls)
	return run("data_out", options)
end

function slurm_bb_test_data_out(id, script, uid, gid, info)
	return poll("test_data_out", job(id, script, uid, gid, info))
end

function slurm_bb_job_teardown(id, script, hurry, uid, gid)
	local options = job(id, nil, uid, gid)
	options.hurry = tostring(tostring(hurry) == "true")
	return run("teardown", options)
end

function slurm_bb_get_status(...)
	local arguments = { ... }
	if long_arguments then
		-- The caller's uid and gid.
		table.remove(arguments, 1)
		table.remove(arguments, 1)
	end
	local status, message = call("status", {}, arguments)
	if status == "ok" then
		return slurm.SUCCESS, message .. "\n"
	end
	return slurm.ERROR, message
end

return slurm.SUCCESS
