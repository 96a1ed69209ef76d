package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"cloud.google.com/go/compute/metadata"
	"cloud.google.com/go/storage"
	"google.golang.org/api/googleapi"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"
	htransport "google.golang.org/api/transport/http"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/gcp/iam"
	"github.com/sluicehpc/sluice/internal/clock"
	"github.com/sluicehpc/sluice/trust/idtoken"
)

// proveIdentityToken asks for a token as an agent does that enrols, and checks it as sluiced does.
func proveIdentityToken(ctx context.Context, l *Lab) (string, error) {
	key := strings.Repeat("0123456789abcdef", 4) // as long as a SHA-256
	audience := "sluice:enroll:" + key + ":" + key
	token, err := metadata.GetWithContext(ctx, "instance/service-accounts/default/identity?format=full&audience="+url.QueryEscape(audience))
	if err != nil {
		return "", refuted("the metadata server gives no identity token: %v", err)
	}
	in, err := idtoken.New(l.Config.Endpoints.IAM, clock.System).Verify(ctx, strings.TrimSpace(token), audience)
	switch {
	case errors.Is(err, idtoken.ErrUnavailable):
		return "", err
	case err != nil:
		return "", refuted("%v", err)
	}
	vm, err := l.Compute.Get(ctx, in.Name)
	if err != nil {
		return "", err
	}
	if in.ID != fmt.Sprint(vm.ID) || in.Created.Unix() != vm.Created.Unix() || in.Zone != vm.Zone || in.Project != l.Config.Project {
		return "", refuted("the token is of %+v, Compute Engine shows id %d, zone %s, made at %s", in, vm.ID, vm.Zone, vm.Created)
	}
	return fmt.Sprintf("the token verifies for an audience of %d characters; it names VM %s, id %s, made at %s, as Compute Engine does", len(audience), in.Name, in.ID, in.Created.UTC().Format("2006-01-02T15:04:05Z")), nil
}

// forbidden is a permission that sluiced's account must not have.
const forbidden = "resourcemanager.projects.setIamPolicy"

func proveTestPermissions(ctx context.Context, l *Lab) (string, error) {
	asked := append(iam.Names(iam.ControllerPermissions), forbidden)
	missing, err := l.IAM.TestProject(ctx, l.Config.Project, asked)
	switch {
	case err != nil:
		return "", refuted("%v", err)
	case len(missing) == len(asked):
		return "", refuted("the answer is that this account has none of %d permissions, though it works", len(asked))
	case !slices.Contains(missing, forbidden):
		return "", notApplicable("this account may do everything, also %s: give it a role with the permissions of docs/permissions.md alone", forbidden)
	}
	return fmt.Sprintf("of %d permissions it names the %d that this account has", len(asked), len(asked)-len(missing)), nil
}

// proveDownscoped tries a prefix's token on the prefix and beside it.
func proveDownscoped(ctx context.Context, l *Lab) (string, error) {
	if l.Account == "" {
		return "", notApplicable("no service account is given: name one with --service-account, or a rule of policy for the bucket")
	}
	if err := l.put(ctx, "inside/", map[string]string{"object": "x"}); err != nil {
		return "", err
	}
	if err := l.put(ctx, "outside/", map[string]string{"object": "x"}); err != nil {
		return "", err
	}
	token := l.dataToken()
	token.Prefix, token.Write = l.Prefix+"inside/", false
	opts := []option.ClientOption{storage.WithJSONReads(), option.WithTokenSource(l.IAM.DataSource(ctx, token))}
	if e := l.Config.Endpoints.Storage; e != "" {
		opts = append(opts, option.WithEndpoint(e+"/storage/v1/"))
	}
	client, err := storage.NewClient(ctx, opts...)
	if err != nil {
		return "", err
	}
	defer client.Close()
	bucket := client.Bucket(l.Bucket)
	list := func(prefix string) func() error {
		return func() error {
			_, err := bucket.Objects(ctx, &storage.Query{Prefix: prefix}).Next()
			if errors.Is(err, iterator.Done) {
				err = errors.New("the list is empty")
			}
			return err
		}
	}
	read := func(name string) func() error {
		return func() error {
			r, err := bucket.Object(l.Prefix + name).NewReader(ctx)
			if err == nil {
				err = r.Close()
			}
			return err
		}
	}
	write := func(name string) func() error {
		return func() error {
			w := bucket.Object(l.Prefix + name).NewWriter(ctx)
			_, err := w.Write([]byte("y"))
			return errors.Join(err, w.Close())
		}
	}
	for _, try := range []struct {
		what  string
		do    func() error
		allow bool
	}{
		{"list its prefix", list(l.Prefix + "inside/"), true},
		{"read below its prefix", read("inside/object"), true},
		{"list the prefix beside it", list(l.Prefix + "outside/"), false},
		{"list the prefix above it", list(l.Prefix), false},
		{"list the whole bucket", list(""), false},
		{"read beside its prefix", read("outside/object"), false},
		{"write below its prefix", write("inside/object"), false},
		{"write beside its prefix", write("outside/object"), false},
	} {
		err := try.do()
		switch {
		case try.allow && err != nil:
			return "", refuted("a token to read %s cannot %s: %v", l.url("inside/"), try.what, err)
		case !try.allow && err == nil:
			return "", refuted("a token to read %s can %s", l.url("inside/"), try.what)
		case !try.allow && gcp.Code(err) != 403:
			return "", fmt.Errorf("%s: %w", try.what, err)
		}
	}
	return "a read token of one prefix lists and reads it, and is refused (403) for lists and objects beside and above it, and for writing", nil
}

// proveGuard tries the metadata address as nobody, here and on a node.
func proveGuard(ctx context.Context, l *Lab) (string, error) {
	if !*l.Config.GuardMetadata {
		return "", notApplicable("guard_metadata is off in sluice.yaml")
	}
	var s Site
	s.setDefaults()
	if err := s.Connect(ctx, 0, metadataHost); err != nil {
		return "", refuted("root cannot reach the metadata server: %v", err)
	}
	err := s.Connect(ctx, nobody, metadataHost)
	switch {
	case missingProgram(err):
		return "", err
	case err == nil:
		return "", refuted("a user of this VM reaches the metadata server")
	}
	if err := s.Connect(ctx, nobody, metadataDNS); err != nil {
		return "", refuted("users cannot resolve names any more: %s: %v", metadataDNS, err)
	}
	// The job succeeds where the user is kept away.
	node, err := l.job(ctx, `! setpriv --reuid=65534 --regid=65534 --clear-groups bash -c 'exec 3<>/dev/tcp/169.254.169.254/80' && bash -c 'exec 3<>/dev/tcp/169.254.169.254/80'`)
	var v *verdict
	if errors.As(err, &v) {
		return "", refuted("on the node either users reach the metadata server or root does not: %v", err)
	}
	if err != nil {
		return "", err
	}
	return "here and on " + node + " root reaches the metadata server and uid 65534 does not, except for DNS", nil
}

// metadataDNS is the VM's resolver, at the same address.
const metadataDNS = "169.254.169.254:53"

// proveDenied makes calls that the role does not allow, and that change nothing where they are allowed.
func proveDenied(ctx context.Context, l *Lab) (string, error) {
	endpoints := l.Config.Endpoints.GCP()
	computeURL := cmp.Or(endpoints.Compute, "https://compute.googleapis.com")
	storageURL := cmp.Or(endpoints.Storage, "https://storage.googleapis.com")
	client, _, err := htransport.NewClient(ctx, option.WithScopes(iam.CloudPlatform))
	if err != nil {
		return "", err
	}
	get := func(url string) func() error {
		return func() error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return err
			}
			resp, err := client.Do(req)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			return googleapi.CheckResponse(resp)
		}
	}
	parent, _, _ := strings.Cut(l.FS.Instance, "/instances/")
	calls := []struct {
		permission string
		do         func() error
	}{
		{"compute.images.list", get(computeURL + "/compute/v1/projects/" + l.Config.Project + "/global/images")},
		{"storage.objects.list", get(storageURL + "/storage/v1/b/" + l.Bucket + "/o?maxResults=1")},
		{"lustre.instances.list", func() error { _, err := l.Lustre.ListInstances(ctx, parent, ""); return err }},
	}
	if account := l.smallest().ServiceAccount; account != "" {
		calls = append(calls, struct {
			permission string
			do         func() error
		}{"iam.serviceAccounts.getAccessToken", func() error { _, err := l.IAM.GenerateAccessToken(ctx, account, nil, time.Minute*5); return err }})
	}
	var seen []string
	for _, call := range calls {
		err := call.do()
		if err == nil {
			return "", notApplicable("this account has %s: give it a role with the permissions of docs/permissions.md alone", call.permission)
		}
		denied, is := gcp.IsDenied(err)
		switch {
		case !is:
			return "", fmt.Errorf("%s: %w", call.permission, err)
		case denied.Permission != call.permission || denied.Resource == "" && call.permission != "storage.objects.list": // Storage says "the bucket"
			return "", refuted("a refusal for want of %s names permission %q and resource %q: %s", call.permission, denied.Permission, denied.Resource, denied.Message)
		}
		seen = append(seen, denied.Permission)
	}
	return "refusals name what is missing: " + strings.Join(seen, ", "), nil
}
