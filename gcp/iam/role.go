package iam

// Permission is one that sluiced's service account needs.
type Permission struct {
	Name string
	For  string // what sluiced does with it
}

// ControllerPermissions are what sluiced's account needs on the project: the
// custom role of docs/permissions.md. It has none on data.
var ControllerPermissions = []Permission{
	{"compute.instances.create", "start nodes"},
	{"compute.instances.delete", "delete nodes"},
	{"compute.instances.get", "see that a VM that wants a certificate is one of the cluster's"},
	{"compute.instances.list", "see which nodes there are"},
	{"compute.instances.setLabels", "mark nodes as the cluster's"},
	{"compute.instances.setMetadata", "tell nodes where sluiced is"},
	{"compute.instances.setServiceAccount", "give nodes their own account, which has no rights"},
	{"compute.disks.create", "make nodes' boot disks"},
	{"compute.images.useReadOnly", "boot nodes from their image"},
	{"compute.subnetworks.use", "put nodes into their network"},
	{"compute.zoneOperations.get", "hear how starting and deleting nodes went"},
	{"lustre.instances.get", "see the state and the address of file systems"},
	{"lustre.instances.importData", "stage in"},
	{"lustre.instances.exportData", "stage out"},
	{"lustre.operations.get", "follow stage-ins and stage-outs"},
	{"lustre.operations.list", "find one again after a crash"},
	{"lustre.operations.cancel", "cancel one that no job wants any more"},
}

// DataAccountPermissions are what sluiced's account needs on each service account
// that policy names.
var DataAccountPermissions = []Permission{
	{"iam.serviceAccounts.getAccessToken", "mint short-lived tokens for a job's prefixes alone"},
	{"iam.serviceAccounts.actAs", "let Managed Lustre move data as the account"},
}

// NodeAccountPermissions are what sluiced's account needs on each service account
// that a node set names.
var NodeAccountPermissions = []Permission{
	{"iam.serviceAccounts.actAs", "start nodes under the account"},
}

// Names are the permissions' names.
func Names(list []Permission) []string {
	names := make([]string, len(list))
	for i, p := range list {
		names[i] = p.Name
	}
	return names
}
