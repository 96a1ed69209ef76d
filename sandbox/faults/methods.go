package faults

import (
	"net/http"
	"slices"
	"strings"
)

// methods are the services' methods as keys name them: as Google's discovery documents do, without the service and "projects".
var methods = map[string][]string{
	"compute": {
		"globalOperations.delete", "globalOperations.get", "globalOperations.list", "globalOperations.wait",
		"images.delete", "images.get", "images.getFromFamily", "images.insert", "images.list",
		"instanceTemplates.delete", "instanceTemplates.get", "instanceTemplates.insert", "instanceTemplates.list",
		"instances.aggregatedList", "instances.bulkInsert", "instances.delete", "instances.get", "instances.getSerialPortOutput",
		"instances.insert", "instances.list", "instances.setLabels", "instances.setMetadata", "instances.start", "instances.stop",
		"machineTypes.aggregatedList", "machineTypes.get", "machineTypes.list",
		"networks.get", "networks.list", "operations.aggregatedList", "other",
		"projects.get", "projects.setCommonInstanceMetadata",
		"regionInstanceTemplates.delete", "regionInstanceTemplates.get", "regionInstanceTemplates.insert", "regionInstanceTemplates.list",
		"regionInstances.bulkInsert", "regionOperations.delete", "regionOperations.get", "regionOperations.list", "regionOperations.wait",
		"regions.get", "regions.list", "subnetworks.aggregatedList", "subnetworks.get", "subnetworks.list",
		"zoneOperations.delete", "zoneOperations.get", "zoneOperations.list", "zoneOperations.wait", "zones.get", "zones.list",
	},
	"iam": {
		"certs", "generateAccessToken", "getIamPolicy", "other", "roles.create", "roles.delete", "roles.get", "roles.list", "roles.patch",
		"serviceAccounts.create", "serviceAccounts.delete", "serviceAccounts.get", "serviceAccounts.list", "setIamPolicy", "testIamPermissions", "token",
	},
	"lustre": {
		"instances.create", "instances.delete", "instances.exportData", "instances.get", "instances.importData", "instances.list", "instances.patch",
		"locations.get", "locations.list", "operations.cancel", "operations.delete", "operations.get", "operations.list", "other",
	},
	"metadata":   {"get", "identity", "token"},
	"monitoring": {"other", "timeSeries.list"},
	"storage": {
		"buckets.delete", "buckets.get", "buckets.getIamPolicy", "buckets.insert", "buckets.list", "buckets.patch", "buckets.setIamPolicy",
		"buckets.testIamPermissions", "buckets.update", "objects.compose", "objects.copy", "objects.delete", "objects.get", "objects.insert",
		"objects.list", "objects.move", "objects.patch", "objects.rewrite", "objects.update", "other", "serviceAccount.get",
	},
}

// Services are the names for SERVICE.
func Services() []string {
	return []string{"compute", "iam", "lustre", "metadata", "monitoring", "storage"}
}

// Methods are the names for METHOD of a service, sorted; "other" is what has no name.
func Methods(service string) []string { return methods[service] }

// MethodOf names the method that a request to a service asks for.
func MethodOf(service string, r *http.Request) string {
	path := strings.TrimPrefix(r.URL.EscapedPath(), "/")
	name := ""
	switch service {
	case "compute":
		name = computeMethod(r.Method, strings.Split(path, "/"))
	case "iam":
		name = iamMethod(r.Method, path)
	case "lustre":
		name = lustreMethod(r.Method, strings.Split(path, "/"))
	case "metadata":
		return metadataMethod(path)
	case "monitoring":
		if r.Method == http.MethodGet && strings.HasSuffix(path, "/timeSeries") {
			name = "timeSeries.list"
		}
	case "storage":
		name = storageMethod(r.Method, path)
	}
	if !slices.Contains(methods[service], name) {
		return "other"
	}
	return name
}

// verbs are what the HTTP methods mean on one resource.
var verbs = map[string]string{"GET": "get", "HEAD": "get", "DELETE": "delete", "PATCH": "patch", "PUT": "update"}

// collectionVerbs are what they mean on a collection.
var collectionVerbs = map[string]string{"GET": "list", "HEAD": "list"}

func verb(method string, resource bool, post string) string {
	switch {
	case method == "POST" && !resource:
		return post
	case resource:
		return verbs[method]
	}
	return collectionVerbs[method]
}

// computeMethod names compute/v1/projects/P[/SCOPE][/COLLECTION[/NAME[/VERB]]].
func computeMethod(method string, part []string) string {
	if len(part) < 4 || part[2] != "projects" {
		return ""
	}
	part = part[4:]
	prefix := ""
	switch {
	case len(part) == 0:
		return "projects." + verbs[method]
	case len(part) == 1 && part[0] != "zones" && part[0] != "regions":
		return "projects." + part[0]
	case part[0] == "aggregated" && len(part) == 2:
		return part[1] + ".aggregatedList"
	case part[0] == "global":
		part, prefix = part[1:], "global"
	case len(part) <= 2: // zones and regions themselves
		return part[0] + "." + verb(method, len(part) == 2, "insert")
	case part[0] == "zones":
		part, prefix = part[2:], "zone"
	case part[0] == "regions":
		part, prefix = part[2:], "region"
	}
	collection := part[0]
	switch {
	case collection == "operations":
		collection = prefix + "Operations"
	case prefix == "region" && collection != "subnetworks":
		collection = "region" + strings.ToUpper(collection[:min(1, len(collection))]) + collection[min(1, len(collection)):]
	}
	switch {
	case len(part) == 2 && part[1] == "bulkInsert":
		return collection + ".bulkInsert"
	case len(part) == 3 && part[1] == "family":
		return collection + ".getFromFamily"
	case len(part) == 3 && part[2] == "serialPort":
		return collection + ".getSerialPortOutput"
	case len(part) == 3:
		return collection + "." + part[2]
	}
	return collection + "." + verb(method, len(part) == 2, "insert")
}

// lustreMethod names v1/projects/P/locations[/Z[/COLLECTION[/NAME[:VERB]]]].
func lustreMethod(method string, part []string) string {
	if len(part) < 4 || len(part) > 7 {
		return ""
	}
	if len(part) <= 5 {
		return "locations." + verb(method, len(part) == 5, "")
	}
	collection := part[5]
	if len(part) == 6 {
		return collection + "." + verb(method, false, "create")
	}
	if _, v, ok := strings.Cut(part[6], ":"); ok {
		return collection + "." + v
	}
	return collection + "." + verb(method, true, "")
}

// storageMethod names the JSON API's methods; any other path is an XML read.
func storageMethod(method, path string) string {
	upload := false
	for _, prefix := range []string{"resumable/upload/", "upload/", "download/"} {
		if rest, ok := strings.CutPrefix(path, prefix); ok {
			path, upload = rest, prefix != "download/"
			break
		}
	}
	rest, json := strings.CutPrefix(path, "storage/v1/")
	switch {
	case !json && (method == "GET" || method == "HEAD") && strings.Contains(path, "/"):
		return "objects.get"
	case !json:
		return ""
	case upload:
		return "objects.insert"
	}
	part := strings.Split(rest, "/")
	switch {
	case len(part) == 3 && part[0] == "projects":
		return "serviceAccount.get"
	case part[0] != "b":
		return ""
	case len(part) <= 2:
		return "buckets." + verb(method, len(part) == 2, "insert")
	case part[2] == "iam" && len(part) == 3:
		return "buckets." + map[string]string{"GET": "getIamPolicy", "PUT": "setIamPolicy"}[method]
	case part[2] == "iam":
		return "buckets.testIamPermissions"
	case part[2] != "o":
		return ""
	case len(part) <= 4:
		return "objects." + verb(method, len(part) == 4, "insert")
	}
	return "objects." + map[string]string{"compose": "compose", "rewriteTo": "rewrite", "copyTo": "copy", "moveTo": "move"}[part[4]]
}

// iamMethod names what IAM, its credentials service, STS, the resource manager and the key set do.
func iamMethod(method, path string) string {
	_, v, custom := strings.Cut(path, ":")
	part := strings.Split(path, "/")
	switch {
	case custom:
		return v
	case path == "v1/token" || path == "token":
		return "token"
	case path == "oauth2/v3/certs":
		return "certs"
	case len(part) == 4 || len(part) == 5:
		return part[3] + "." + verb(method, len(part) == 5, "create")
	}
	return ""
}

func metadataMethod(path string) string {
	for _, name := range []string{"token", "identity"} {
		if strings.HasSuffix(path, "/"+name) {
			return name
		}
	}
	return "get"
}
