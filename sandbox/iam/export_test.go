package iam

// RoutePermissions are the permissions of all routes ("METHOD PATH").
func RoutePermissions() map[string]string {
	all := map[string]string{}
	for _, r := range routes {
		all[r.method+" "+r.path] = r.permission
	}
	return all
}
