package lustre

// MethodPermissions is the permission of each method.
func MethodPermissions() map[string]string {
	all := map[string]string{}
	for key, m := range methods {
		all[key] = m.permission
	}
	return all
}
