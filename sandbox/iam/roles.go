package iam

import (
	"slices"
	"strings"
)

// list reads a table: a line is a prefix and the names that follow it.
func list(table string) []string {
	var all []string
	for line := range strings.Lines(table) {
		words := strings.Fields(line)
		for i := 1; i < len(words); i++ {
			all = append(all, words[0]+"."+words[i])
		}
	}
	slices.Sort(all)
	return all
}

// known are the permissions that the sandbox's services ask for, and their neighbours.
var known = list(`
compute.acceleratorTypes get list
compute.addresses create createInternal delete get list use useInternal
compute.autoscalers create delete get list update
compute.backendServices create delete get list update use
compute.disks create delete get list resize setLabels use useReadOnly
compute.firewalls create delete get list update
compute.forwardingRules create delete get list setLabels setTarget update use
compute.globalAddresses create delete get list use
compute.globalForwardingRules create delete get list setLabels setTarget update
compute.globalOperations delete get list
compute.healthChecks create delete get list update use useReadOnly
compute.images create delete get getFromFamily list setLabels update useReadOnly
compute.instanceGroupManagers create delete get list update use
compute.instanceGroups create delete get list update use
compute.instanceTemplates create delete get list useReadOnly
compute.instances attachDisk create delete detachDisk get getGuestAttributes getSerialPortOutput list reset resume setLabels
compute.instances setMachineType setMetadata setScheduling setServiceAccount setTags simulateMaintenanceEvent start stop suspend update use
compute.machineTypes get list
compute.networks access create delete get list updatePolicy use useExternalIp
compute.projects get setCommonInstanceMetadata
compute.regionBackendServices create delete get list update use
compute.regionHealthChecks create delete get list update use useReadOnly
compute.regionOperations delete get list
compute.regionTargetHttpProxies create delete get list use
compute.regionUrlMaps create delete get list update use
compute.regions get list
compute.reservations create delete get list resize
compute.resourcePolicies create delete get list use useReadOnly
compute.routers create delete get list update
compute.routes create delete get list
compute.sslCertificates create delete get list
compute.subnetworks create delete get list update use useExternalIp
compute.targetHttpProxies create delete get list use
compute.targetHttpsProxies create delete get list use
compute.urlMaps create delete get list update use
compute.zoneOperations delete get list
compute.zones get list
iam.roles create delete get list undelete update
iam.serviceAccounts actAs create delete disable enable get getAccessToken getIamPolicy getOpenIdToken implicitDelegation list setIamPolicy
iam.serviceAccounts signBlob signJwt undelete update
lustre.instances create delete exportData get importData list rescheduleMaintenance update
lustre.locations get list
lustre.operations cancel delete get list
logging.logEntries create
monitoring.metricDescriptors create get list
monitoring.timeSeries create list
resourcemanager.projects get getIamPolicy setIamPolicy
serviceusage.services get list use
storage.buckets create delete get getIamPolicy list setIamPolicy update
storage.objects create delete get getIamPolicy list move restore setIamPolicy update
`)

func isKnown(permission string) bool {
	_, ok := slices.BinarySearch(known, permission)
	return ok
}

// predefined are Google's roles, as far as the sandbox's permissions go.
var predefined = map[string]*role{
	"roles/owner":  {title: "Owner", permissions: known},
	"roles/editor": {title: "Editor", permissions: knownWhere(func(p string) bool { return !forOwners(p) })},
	"roles/viewer": {title: "Viewer", permissions: knownWhere(reads)},

	"roles/compute.admin": {title: "Compute Admin", permissions: knownWhere(in("compute"))},
	"roles/compute.instanceAdmin.v1": {title: "Compute Instance Admin (v1)", permissions: append(knownWhere(in("compute.instances", "compute.disks", "compute.instanceTemplates", "compute.instanceGroups", "compute.instanceGroupManagers", "compute.zoneOperations", "compute.machineTypes", "compute.zones", "compute.regions")), list(`
		compute.images get getFromFamily list useReadOnly
		compute.networks get list use
		compute.projects get
		compute.globalOperations get list
		compute.regionOperations get list
		compute.subnetworks get list use useExternalIp
		resourcemanager.projects get`)...)},
	"roles/compute.viewer":       {title: "Compute Viewer", permissions: knownWhere(func(p string) bool { return in("compute")(p) && reads(p) })},
	"roles/compute.networkUser":  {title: "Compute Network User", permissions: list("compute.networks get list use useExternalIp access\ncompute.subnetworks get list use useExternalIp")},
	"roles/compute.imageUser":    {title: "Compute Image User", permissions: list("compute.images get getFromFamily list useReadOnly")},
	"roles/compute.networkAdmin": {title: "Compute Network Admin", permissions: knownWhere(in("compute.networks", "compute.subnetworks", "compute.routers", "compute.routes", "compute.addresses"))},

	"roles/iam.serviceAccountAdmin":              {title: "Service Account Admin", permissions: list("iam.serviceAccounts create delete disable enable get getIamPolicy list setIamPolicy undelete update\nresourcemanager.projects get")},
	"roles/iam.serviceAccountUser":               {title: "Service Account User", permissions: list("iam.serviceAccounts actAs get list\nresourcemanager.projects get")},
	"roles/iam.serviceAccountTokenCreator":       {title: "Service Account Token Creator", permissions: list("iam.serviceAccounts get getAccessToken getOpenIdToken implicitDelegation list signBlob signJwt\nresourcemanager.projects get")},
	"roles/iam.serviceAccountOpenIdTokenCreator": {title: "Service Account OpenID Connect Identity Token Creator", permissions: list("iam.serviceAccounts getOpenIdToken")},
	"roles/iam.roleAdmin":                        {title: "Role Administrator", permissions: list("iam.roles create delete get list undelete update\nresourcemanager.projects get getIamPolicy")},
	"roles/resourcemanager.projectIamAdmin":      {title: "Project IAM Admin", permissions: list("resourcemanager.projects get getIamPolicy setIamPolicy")},

	"roles/lustre.admin":        {title: "Managed Lustre Admin", permissions: append(knownWhere(in("lustre")), "resourcemanager.projects.get")},
	"roles/lustre.viewer":       {title: "Managed Lustre Viewer", permissions: list("lustre.instances get list\nlustre.locations get list\nlustre.operations get list\nresourcemanager.projects get")},
	"roles/lustre.serviceAgent": {title: "Managed Lustre Service Agent", permissions: list("compute.networks get\nresourcemanager.projects get")},

	"roles/logging.logWriter":       {title: "Logs Writer", permissions: list("logging.logEntries create")},
	"roles/monitoring.metricWriter": {title: "Monitoring Metric Writer", permissions: list("monitoring.metricDescriptors create get list\nmonitoring.timeSeries create")},
	"roles/monitoring.viewer":       {title: "Monitoring Viewer", permissions: list("monitoring.metricDescriptors get list\nmonitoring.timeSeries list")},

	"roles/storage.admin":         {title: "Storage Admin", permissions: knownWhere(in("storage"))},
	"roles/storage.bucketViewer":  {title: "Storage Bucket Viewer", permissions: list("storage.buckets get list")},
	"roles/storage.objectAdmin":   {title: "Storage Object Admin", permissions: append(knownWhere(in("storage.objects")), "resourcemanager.projects.get")},
	"roles/storage.objectUser":    {title: "Storage Object User", permissions: list("storage.objects create delete get list move restore update\nresourcemanager.projects get")},
	"roles/storage.objectCreator": {title: "Storage Object Creator", permissions: list("storage.objects create\nresourcemanager.projects get")},
	"roles/storage.objectViewer":  {title: "Storage Object Viewer", permissions: list("storage.objects get list\nresourcemanager.projects get")},

	"roles/storage.legacyBucketOwner":  {title: "Storage Legacy Bucket Owner", permissions: list("storage.buckets get getIamPolicy setIamPolicy update\nstorage.objects create delete list restore")},
	"roles/storage.legacyBucketWriter": {title: "Storage Legacy Bucket Writer", permissions: list("storage.buckets get\nstorage.objects create delete list restore")},
	"roles/storage.legacyBucketReader": {title: "Storage Legacy Bucket Reader", permissions: list("storage.buckets get\nstorage.objects list")},
	"roles/storage.legacyObjectOwner":  {title: "Storage Legacy Object Owner", permissions: list("storage.objects get getIamPolicy setIamPolicy update")},
	"roles/storage.legacyObjectReader": {title: "Storage Legacy Object Reader", permissions: list("storage.objects get")},
}

func knownWhere(keep func(string) bool) []string {
	var some []string
	for _, p := range known {
		if keep(p) {
			some = append(some, p)
		}
	}
	return some
}

// in keeps the permissions of services and kinds of resource.
func in(prefixes ...string) func(string) bool {
	return func(p string) bool {
		return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(p, prefix+".") })
	}
}

// reads tells permissions that change nothing and give nothing away but what they show.
func reads(permission string) bool {
	verb := permission[strings.LastIndexByte(permission, '.')+1:]
	return (verb == "get" || verb == "list" || verb == "getFromFamily" || verb == "getSerialPortOutput" || verb == "getGuestAttributes") &&
		!strings.HasPrefix(permission, "storage.objects.")
}

// forOwners tells the permissions that an editor of a project has not.
func forOwners(permission string) bool {
	return strings.HasSuffix(permission, ".setIamPolicy") || strings.HasPrefix(permission, "iam.roles.") && !reads(permission) ||
		strings.HasPrefix(permission, "iam.serviceAccounts.get") && permission != "iam.serviceAccounts.get" && permission != "iam.serviceAccounts.getIamPolicy" ||
		slices.Contains([]string{"iam.serviceAccounts.implicitDelegation", "iam.serviceAccounts.signBlob", "iam.serviceAccounts.signJwt"}, permission) ||
		strings.HasPrefix(permission, "storage.objects.")
}

// role is a set of permissions.
type role struct {
	title, description, stage string
	permissions               []string
	deleted                   bool
	version                   uint64 // counts changes, for the etag
}

// role finds a predefined role or one of the project's. s.mu is held.
func (s *Server) role(name string) *role {
	if r := predefined[name]; r != nil {
		return r
	}
	return s.roles[name]
}

// grantsPermission reports whether a role of that name holds a permission. s.mu is held.
func (s *Server) grantsPermission(name, permission string) bool {
	r := s.role(name)
	return r != nil && !r.deleted && slices.Contains(r.permissions, permission)
}

// KnownPermissions are all permissions that roles can hold, sorted.
func KnownPermissions() []string { return slices.Clone(known) }
