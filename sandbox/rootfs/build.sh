#!/bin/sh
# Builds a root for the sandbox's VMs. Runs as PID 1 of mount and pid namespaces of its own, so a
# killed build leaves no mount and no process.
# Environment: ROOT (does not exist yet), MIRROR, SUITE, PACKAGES, PROXY (may be empty), USERS
# (name:id pairs), USER_GROUPS (name:id:members), SLURM_UID, MUNGE_UID, SLURM (its version, without the patch
# level). The exit status is 75 when it is the suite that cannot be had, not this script that is wrong.
set -eu

say() { printf 'rootfs: %s\n' "$*"; }
unavailable() {
	say "$*" >&2
	exit 75 # EX_TEMPFAIL
}

mount --make-rprivate /
mount -t proc proc /proc

export LC_ALL=C DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin
if [ -n "$PROXY" ]; then
	export http_proxy="$PROXY" https_proxy="$PROXY"
fi

say "installing the base system of $SUITE"
debootstrap --variant=minbase "$SUITE" "$ROOT" "$MIRROR" ||
	unavailable "debootstrap cannot install $SUITE"

# Debian gives these uids to whoever installs first; files on shared disks need them fixed.
in_root() { chroot "$ROOT" "$@"; }
mount -t proc proc "$ROOT/proc"
in_root groupadd --system --gid "$SLURM_UID" slurm
in_root useradd --system --uid "$SLURM_UID" --gid slurm --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin slurm
in_root groupadd --system --gid "$MUNGE_UID" munge
in_root useradd --system --uid "$MUNGE_UID" --gid munge --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin munge

printf '#!/bin/sh\nexit 101\n' >"$ROOT/usr/sbin/policy-rc.d"
chmod 755 "$ROOT/usr/sbin/policy-rc.d"
cat >"$ROOT/etc/dpkg/dpkg.cfg.d/sandbox" <<'END'
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
force-unsafe-io
END
printf 'APT::Install-Recommends "false";\nAcquire::Languages "none";\nAcquire::Check-Valid-Until "false";\n' >"$ROOT/etc/apt/apt.conf.d/90sandbox"

say "installing packages: $PACKAGES"
# shellcheck disable=SC2086 # a list of words
in_root apt-get -q install -y $PACKAGES || unavailable "$SUITE cannot install $PACKAGES"
version=$(in_root slurmctld -V)
case $version in
"slurm-wlm $SLURM."*) ;;
*) unavailable "$SUITE has $version, not $SLURM" ;;
esac

say "preparing users and the database"
# Not in /etc/passwd, as the users of OS Login or LDAP are not: only NSS knows them.
extra="$ROOT/var/lib/extrausers"
install -d "$extra"
for pair in $USERS; do
	name=${pair%:*} id=${pair#*:}
	printf '%s:x:%s:%s::/home/%s:/bin/bash\n' "$name" "$id" "$id" "$name" >>"$extra/passwd"
	printf '%s:x:%s:\n' "$name" "$id" >>"$extra/group"
	cp -R "$ROOT/etc/skel" "$ROOT/home/$name"
	chmod 700 "$ROOT/home/$name"
	chown -R "$id:$id" "$ROOT/home/$name"
done
for group in $USER_GROUPS; do
	printf '%s:x:%s\n' "${group%%:*}" "${group#*:}" >>"$extra/group"
done

printf '127.0.0.1 localhost\n' >"$ROOT/etc/hosts" # mariadb-install-db looks it up

# A data directory with small logs, made once: it answers in half a second at boot.
rm -rf "$ROOT/var/lib/mysql" "$ROOT/var/lib/mariadb"
install -d -m 700 "$ROOT/var/lib/mysql"
in_root chown mysql:mysql /var/lib/mysql
in_root mariadb-install-db --no-defaults --user=mysql --datadir=/var/lib/mysql \
	--auth-root-authentication-method=socket --skip-test-db \
	--innodb-log-file-size=8M --innodb-buffer-pool-size=32M >/dev/null
in_root /usr/sbin/mariadbd --no-defaults --user=mysql --datadir=/var/lib/mysql --bootstrap \
	--innodb-log-file-size=8M --innodb-buffer-pool-size=32M <<'END'
USE mysql;
FLUSH PRIVILEGES;
CREATE DATABASE slurm_acct_db;
CREATE USER slurm@localhost IDENTIFIED VIA unix_socket;
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
FLUSH PRIVILEGES;
END

say "removing what no VM needs"
# Whoever makes a VM decides which services it has.
rm -rf "$ROOT"/etc/systemd/system/*.wants "$ROOT"/etc/slurm/*
rm -f "$ROOT/usr/sbin/policy-rc.d" "$ROOT/etc/resolv.conf" "$ROOT/etc/hostname"
in_root apt-get clean
rm -rf "$ROOT"/var/lib/apt/lists/* "$ROOT"/var/cache/apt/*.bin "$ROOT"/var/cache/debconf/*-old \
	"$ROOT"/usr/share/doc/* "$ROOT"/usr/share/man/* "$ROOT"/usr/share/info/* "$ROOT"/usr/share/locale/* \
	"$ROOT"/var/log/*.log "$ROOT"/var/log/apt "$ROOT"/etc/munge/munge.key \
	"$ROOT"/usr/lib/udev/hwdb.d "$ROOT"/usr/bin/mariadb-backup "$ROOT"/usr/bin/aria_* "$ROOT"/usr/bin/mariabackup
: >"$ROOT/etc/machine-id"
printf 'passwd: files extrausers\ngroup: files extrausers\nshadow: files extrausers\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\n' >"$ROOT/etc/nsswitch.conf"
# Slurm's own defaults name /var/spool and /var/log; SlurmUser must own them.
install -d "$ROOT/var/log/slurm" "$ROOT/var/spool/slurmctld" "$ROOT/var/spool/slurmd" "$ROOT/etc/slurm"
in_root chown slurm:slurm /var/log/slurm /var/spool/slurmctld
umount "$ROOT/proc"

for plugin in burst_buffer_lua auth_slurm accounting_storage_mysql; do
	if [ "$plugin" = auth_slurm ] && [ "$SUITE" = bookworm ]; then
		continue # Slurm 22.05 has only auth/munge
	fi
	found=$(find "$ROOT/usr/lib" -name "$plugin.so" | head -n 1)
	if [ -z "$found" ]; then
		say "the packages of $SUITE brought no $plugin.so" >&2
		exit 1
	fi
done
say "done: $(du -sm "$ROOT" | cut -f1) MB"
