// Package lustre is a client of the Managed Lustre API, version 1, over REST.
//
// Its calls have the shape of the official Go client, which can take its place once it can be
// downloaded. Errors of the service are *googleapi.Error: package gcp tells what they mean.
package lustre

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/api/googleapi"
	"google.golang.org/api/option"
	htransport "google.golang.org/api/transport/http"

	"github.com/sluicehpc/sluice/gcp"
	"github.com/sluicehpc/sluice/internal/clock"
)

const (
	defaultEndpoint = "https://lustre.googleapis.com"
	scope           = "https://www.googleapis.com/auth/cloud-platform"
	// callTimeout bounds one HTTP exchange. Every call of the API answers at once: work that takes longer is an operation.
	callTimeout = 60 * time.Second
	// maxAnswer bounds an answer's body, in bytes.
	maxAnswer = 64 << 20
)

// Client calls the API. All methods may be called at the same time. Reads are repeated while the
// service is overloaded or unreachable, until ctx ends; changes are too when they carry a request id.
type Client struct {
	http     *http.Client
	endpoint string
	clock    clock.Clock
}

// NewClient returns a client with the application's default credentials; gcp.ClientOptions gives
// the options for another endpoint.
func NewClient(ctx context.Context, opts ...option.ClientOption) (*Client, error) {
	opts = append([]option.ClientOption{option.WithScopes(scope)}, opts...)
	hc, endpoint, err := htransport.NewClient(ctx, opts...)
	if err != nil {
		return nil, fmt.Errorf("lustre client: %w", err)
	}
	if endpoint == "" {
		endpoint = defaultEndpoint
	}
	return &Client{http: hc, endpoint: strings.TrimSuffix(endpoint, "/"), clock: clock.System}, nil
}

// Names of resources, as the API has them.
var (
	locationName  = regexp.MustCompile(`^projects/[^/?#%]+/locations/[^/?#%]+$`)
	instanceName  = regexp.MustCompile(`^projects/[^/?#%]+/locations/[^/?#%]+/instances/[^/?#%:]+$`)
	operationName = regexp.MustCompile(`^projects/[^/?#%]+/locations/[^/?#%]+/operations/[^/?#%:]+$`)
)

func checkName(re *regexp.Regexp, name string) error {
	if !re.MatchString(name) || strings.Contains(name, "/../") || strings.HasSuffix(name, "/..") {
		return fmt.Errorf("bad resource name %q", name)
	}
	return nil
}

// CreateInstance starts to make an instance.
func (c *Client) CreateInstance(ctx context.Context, r *CreateInstanceRequest) (*Operation, error) {
	if err := checkName(locationName, r.Parent); err != nil {
		return nil, fmt.Errorf("create Lustre instance: %w", err)
	}
	q := url.Values{"instanceId": {r.InstanceID}}
	op := new(Operation)
	err := c.change(ctx, "POST", r.Parent+"/instances", q, r.RequestID, r.Instance, op)
	return op, gcp.Wrap(err, "create Lustre instance "+r.InstanceID)
}

// GetInstance reads an instance.
func (c *Client) GetInstance(ctx context.Context, name string) (*Instance, error) {
	if err := checkName(instanceName, name); err != nil {
		return nil, fmt.Errorf("get Lustre instance: %w", err)
	}
	inst := new(Instance)
	err := c.read(ctx, name, nil, inst)
	return inst, gcp.Wrap(err, "get Lustre instance "+name)
}

// ListInstances reads all instances of parent (projects/P/locations/ZONE, or with - for ZONE all
// zones; a zone that cannot be reached then makes the call fail, so that a list is never short).
func (c *Client) ListInstances(ctx context.Context, parent, filter string) ([]*Instance, error) {
	if err := checkName(locationName, parent); err != nil {
		return nil, fmt.Errorf("list Lustre instances: %w", err)
	}
	var all []*Instance
	err := c.pages(ctx, parent+"/instances", filter, func(body []byte) (string, error) {
		var page struct {
			Instances     []*Instance
			NextPageToken string
			Unreachable   []string
		}
		if err := json.Unmarshal(body, &page); err != nil {
			return "", err
		}
		if len(page.Unreachable) > 0 {
			return "", fmt.Errorf("%s cannot be reached now", strings.Join(page.Unreachable, ", "))
		}
		all = append(all, page.Instances...)
		return page.NextPageToken, nil
	})
	return all, gcp.Wrap(err, "list Lustre instances in "+parent)
}

// UpdateInstance starts to change an instance.
func (c *Client) UpdateInstance(ctx context.Context, r *UpdateInstanceRequest) (*Operation, error) {
	if r.Instance == nil {
		return nil, errors.New("update Lustre instance: no instance given")
	}
	if err := checkName(instanceName, r.Instance.Name); err != nil {
		return nil, fmt.Errorf("update Lustre instance: %w", err)
	}
	q := url.Values{"updateMask": {strings.Join(r.UpdateMask, ",")}}
	op := new(Operation)
	err := c.change(ctx, "PATCH", r.Instance.Name, q, r.RequestID, r.Instance, op)
	return op, gcp.Wrap(err, "update Lustre instance "+r.Instance.Name)
}

// DeleteInstance starts to delete an instance and its data.
func (c *Client) DeleteInstance(ctx context.Context, r *DeleteInstanceRequest) (*Operation, error) {
	if err := checkName(instanceName, r.Name); err != nil {
		return nil, fmt.Errorf("delete Lustre instance: %w", err)
	}
	op := new(Operation)
	err := c.change(ctx, "DELETE", r.Name, url.Values{}, r.RequestID, nil, op)
	return op, gcp.Wrap(err, "delete Lustre instance "+r.Name)
}

// ImportData starts to copy a bucket prefix to the instance. While another transfer of the
// instance runs, the service refuses (gcp.IsConflict).
func (c *Client) ImportData(ctx context.Context, r *ImportDataRequest) (*Operation, error) {
	return c.transfer(ctx, r.Name, ":importData", r.RequestID, r, "import into "+r.Name)
}

// ExportData starts to copy a directory of the instance to a bucket prefix. While another transfer
// of the instance runs, the service refuses (gcp.IsConflict).
func (c *Client) ExportData(ctx context.Context, r *ExportDataRequest) (*Operation, error) {
	return c.transfer(ctx, r.Name, ":exportData", r.RequestID, r, "export from "+r.Name)
}

func (c *Client) transfer(ctx context.Context, name, verb, requestID string, body any, doing string) (*Operation, error) {
	if err := checkName(instanceName, name); err != nil {
		return nil, fmt.Errorf("%s: %w", doing, err)
	}
	op := new(Operation)
	call := func(ctx context.Context) error { return c.do(ctx, "POST", name+verb, nil, body, op) }
	return op, gcp.Wrap(repeat(ctx, requestID != "", call), doing)
}

// GetOperation reads an operation.
func (c *Client) GetOperation(ctx context.Context, name string) (*Operation, error) {
	if err := checkName(operationName, name); err != nil {
		return nil, fmt.Errorf("get operation: %w", err)
	}
	op := new(Operation)
	err := c.read(ctx, name, nil, op)
	return op, gcp.Wrap(err, "get operation "+name)
}

// ListOperations reads the operations of parent (projects/P/locations/ZONE). Only those of version 1
// of the API are asked for, since others have metadata of other types; filter, if any, is added
// (`metadata.target="…"`).
func (c *Client) ListOperations(ctx context.Context, parent, filter string) ([]*Operation, error) {
	if err := checkName(locationName, parent); err != nil {
		return nil, fmt.Errorf("list operations: %w", err)
	}
	full := `metadata.apiVersion="v1"`
	if filter != "" {
		full += " AND " + filter
	}
	var all []*Operation
	err := c.pages(ctx, parent+"/operations", full, func(body []byte) (string, error) {
		var page struct {
			Operations    []*Operation
			NextPageToken string
		}
		err := json.Unmarshal(body, &page)
		all = append(all, page.Operations...)
		return page.NextPageToken, err
	})
	return all, gcp.Wrap(err, "list operations in "+parent)
}

// CancelOperation asks for an operation's end. It may finish nevertheless: Wait tells.
func (c *Client) CancelOperation(ctx context.Context, name string) error {
	if err := checkName(operationName, name); err != nil {
		return fmt.Errorf("cancel operation: %w", err)
	}
	call := func(ctx context.Context) error { return c.do(ctx, "POST", name+":cancel", nil, struct{}{}, nil) }
	return gcp.Wrap(gcp.Retry(ctx, call), "cancel operation "+name) // cancelling twice is the same
}

// DeleteOperation forgets an operation that is done.
func (c *Client) DeleteOperation(ctx context.Context, name string) error {
	if err := checkName(operationName, name); err != nil {
		return fmt.Errorf("delete operation: %w", err)
	}
	err := c.do(ctx, "DELETE", name, nil, nil, nil)
	return gcp.Wrap(err, "delete operation "+name)
}

// ListLocations reads the zones of a project ("projects/P") that have Managed Lustre.
func (c *Client) ListLocations(ctx context.Context, project string) ([]*Location, error) {
	var all []*Location
	err := c.pages(ctx, project+"/locations", "", func(body []byte) (string, error) {
		var page struct {
			Locations     []*Location
			NextPageToken string
		}
		err := json.Unmarshal(body, &page)
		all = append(all, page.Locations...)
		return page.NextPageToken, err
	})
	return all, gcp.Wrap(err, "list Lustre locations of "+project)
}

// The pauses between two reads of an operation in Wait.
const (
	firstPoll = 100 * time.Millisecond
	lastPoll  = 10 * time.Second
)

// Wait reads the operation until it is done, and returns it with its failure, if any (an
// *OperationError). each, when not nil, is called with every reading. A transfer without a failure
// may still have failed objects.
func (c *Client) Wait(ctx context.Context, name string, each func(*Operation)) (*Operation, error) {
	for pause := firstPoll; ; pause = min(pause*3/2, lastPoll) {
		op, err := c.GetOperation(ctx, name)
		if err != nil {
			return nil, err
		}
		if each != nil {
			each(op)
		}
		if op.Done {
			return op, op.Err()
		}
		select {
		case <-ctx.Done():
			return op, fmt.Errorf("wait for operation %s: %w", name, ctx.Err())
		case <-c.clock.After(pause):
		}
	}
}

func repeat(ctx context.Context, safe bool, call func(context.Context) error) error {
	if !safe {
		return call(ctx)
	}
	return gcp.Retry(ctx, call)
}

func (c *Client) change(ctx context.Context, method, path string, q url.Values, requestID string, body, out any) error {
	if requestID != "" {
		q.Set("requestId", requestID)
	}
	return repeat(ctx, requestID != "", func(ctx context.Context) error {
		return c.do(ctx, method, path, q, body, out)
	})
}

func (c *Client) read(ctx context.Context, path string, q url.Values, out any) error {
	return gcp.Retry(ctx, func(ctx context.Context) error { return c.do(ctx, "GET", path, q, nil, out) })
}

// pages reads a list to its end; add takes one page and returns the next one's token.
func (c *Client) pages(ctx context.Context, path, filter string, add func(body []byte) (string, error)) error {
	q := url.Values{"pageSize": {strconv.Itoa(500)}}
	if filter != "" {
		q.Set("filter", filter)
	}
	for {
		var body json.RawMessage
		if err := c.read(ctx, path, q, &body); err != nil {
			return err
		}
		next, err := add(body)
		if err != nil || next == "" {
			return err
		}
		if next == q.Get("pageToken") {
			return fmt.Errorf("the service repeats the page token %q", next)
		}
		q.Set("pageToken", next)
	}
}

// do makes one exchange. out is nil or a pointer for the answer.
func (c *Client) do(ctx context.Context, method, path string, q url.Values, body, out any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	u := c.endpoint + "/v1/" + path
	if len(q) > 0 {
		u += "?" + q.Encode()
	}
	var payload io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		payload = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, u, payload)
	if err != nil {
		return err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := googleapi.CheckResponse(resp); err != nil {
		return err
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("the answer is not what was asked for: %w", err)
	}
	return nil
}
