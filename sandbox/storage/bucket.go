package storage

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	raw "google.golang.org/api/storage/v1"
)

// bucketWritable are the bucket's fields that update and patch may change.
var bucketWritable = set("acl", "autoclass", "billing", "cors", "defaultEventBasedHold", "defaultObjectAcl", "encryption",
	"iamConfiguration", "ipFilter", "labels", "lifecycle", "logging", "retentionPolicy", "rpo", "softDeletePolicy",
	"storageClass", "versioning", "website")

// bucketInsertable are those that insert takes.
var bucketInsertable = func() map[string]bool {
	m := set("name", "location", "customPlacementConfig", "hierarchicalNamespace", "objectRetention")
	for name := range bucketWritable {
		m[name] = true
	}
	return m
}()

func set(names ...string) map[string]bool {
	m := map[string]bool{}
	for _, name := range names {
		m[name] = true
	}
	return m
}

var storageClasses = set("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE", "MULTI_REGIONAL", "REGIONAL", "DURABLE_REDUCED_AVAILABILITY")

var (
	bucketNameShape = regexp.MustCompile(`^[a-z0-9][-_.a-z0-9]*[a-z0-9]$`)
	labelKeyShape   = regexp.MustCompile(`^\p{Ll}[-_\p{Ll}\p{Lo}\p{N}]{0,62}$`)
	labelValueShape = regexp.MustCompile(`^[-_\p{Ll}\p{Lo}\p{N}]{0,63}$`)
)

// checkBucketName holds the rules of the vendor's page on bucket naming.
func checkBucketName(name string) error {
	ok := len(name) >= 3 && len(name) <= 222 && bucketNameShape.MatchString(name) &&
		!strings.HasPrefix(name, "goog") && !strings.Contains(name, "google") && net.ParseIP(name) == nil
	for part := range strings.SplitSeq(name, ".") {
		ok = ok && part != "" && len(part) <= 63 && part[0] != '-' && part[len(part)-1] != '-'
	}
	if !ok {
		return invalid("Invalid bucket name: '%s'", name)
	}
	return nil
}

func (s *Server) insertBucket(c *call) error {
	if project := c.q.Get("project"); project == "" {
		return &apiError{http.StatusBadRequest, "required", "Required parameter: project"}
	} else if project != s.project {
		return notFound("The requested project was not found.")
	}
	var body json.RawMessage
	if err := c.body(&body); err != nil {
		return err
	}
	b, err := patch(&raw.Bucket{}, body, bucketInsertable, false)
	if err != nil {
		return err
	}
	if err := s.createBucket(c.r.Context(), b); err != nil {
		return err
	}
	return c.reply(bucketJSON(c, b))
}

// createBucket fills in b's defaults and stores it.
func (s *Server) createBucket(ctx context.Context, b *raw.Bucket) error {
	if err := checkBucketName(b.Name); err != nil {
		return err
	}
	now := timeString(s.now())
	b.Location = strings.ToUpper(b.Location)
	if b.Location == "" {
		b.Location = "US"
	}
	switch b.Location {
	case "US", "EU", "ASIA":
		b.LocationType = "multi-region"
	case "NAM4", "EUR4", "ASIA1", "EUR5", "EUR7", "EUR8":
		b.LocationType = "dual-region"
	default:
		b.LocationType = "region"
		if b.CustomPlacementConfig != nil {
			b.LocationType = "dual-region"
		}
	}
	if b.StorageClass == "" {
		b.StorageClass = "STANDARD"
	}
	b.ProjectNumber, b.Metageneration, b.TimeCreated, b.Updated = projectNumber, 1, now, now
	if b.SoftDeletePolicy == nil { // the service's default: seven days
		b.SoftDeletePolicy = &raw.BucketSoftDeletePolicy{RetentionDurationSeconds: int64(sessionLife / time.Second)}
	}
	if err := checkBucket(&raw.Bucket{}, b, now); err != nil {
		return err
	}
	if b.HierarchicalNamespace != nil && b.HierarchicalNamespace.Enabled && !b.IamConfiguration.UniformBucketLevelAccess.Enabled {
		return invalid("Hierarchical namespace can only be enabled on a bucket with uniform bucket-level access.")
	}
	return s.update(ctx, func(t *txn) error {
		switch _, err := findBucket(ctx, t, b.Name); err {
		case errNoBucket:
			return t.putBucket(b)
		case nil:
			return conflict("Your previous request to create the named bucket succeeded and you already own it.")
		default:
			return err
		}
	})
}

func (t *txn) putBucket(b *raw.Bucket) error {
	attrs, err := json.Marshal(b)
	if err != nil {
		return err
	}
	_, err = t.ExecContext(t.ctx, `INSERT INTO buckets VALUES (?, ?) ON CONFLICT DO UPDATE SET attrs = excluded.attrs`, b.Name, attrs)
	return err
}

// checkBucket judges a new state of a bucket and fills in what the service adds to it.
func checkBucket(old, b *raw.Bucket, now string) error {
	if !storageClasses[b.StorageClass] {
		return invalid("Invalid storage class %q.", b.StorageClass)
	}
	if len(b.Labels) > 64 {
		return invalid("A bucket has at most 64 labels.")
	}
	for key, value := range b.Labels {
		if !labelKeyShape.MatchString(key) || !labelValueShape.MatchString(value) {
			return invalid("Invalid label %q: %q.", key, value)
		}
	}
	if b.Lifecycle != nil {
		for _, rule := range b.Lifecycle.Rule {
			if err := checkRule(rule); err != nil {
				return err
			}
		}
	}
	if a := b.Autoclass; a != nil && a.Enabled {
		if a.TerminalStorageClass == "" {
			a.TerminalStorageClass = "NEARLINE"
		}
		if a.TerminalStorageClass != "NEARLINE" && a.TerminalStorageClass != "ARCHIVE" {
			return invalid("Invalid terminal storage class %q.", a.TerminalStorageClass)
		}
		was := old.Autoclass
		a.ToggleTime, a.TerminalStorageClassUpdateTime = now, now
		if was != nil && was.Enabled {
			a.ToggleTime = was.ToggleTime
			if was.TerminalStorageClass == a.TerminalStorageClass {
				a.TerminalStorageClassUpdateTime = was.TerminalStorageClassUpdateTime
			}
		}
	} else if a != nil && old.Autoclass != nil && old.Autoclass.Enabled {
		a.ToggleTime = now
	}
	if p := b.SoftDeletePolicy; p != nil {
		day := int64(24 * time.Hour / time.Second)
		if p.RetentionDurationSeconds != 0 && (p.RetentionDurationSeconds < 7*day || p.RetentionDurationSeconds > 90*day) {
			return invalid("Soft delete retention must be 0 or between 7 and 90 days.")
		}
		p.EffectiveTime = now
		if was := old.SoftDeletePolicy; was != nil && was.RetentionDurationSeconds == p.RetentionDurationSeconds {
			p.EffectiveTime = was.EffectiveTime
		}
	}
	if b.IamConfiguration == nil {
		b.IamConfiguration = &raw.BucketIamConfiguration{}
	}
	ubla := b.IamConfiguration.UniformBucketLevelAccess
	if ubla == nil {
		ubla = &raw.BucketIamConfigurationUniformBucketLevelAccess{}
		b.IamConfiguration.UniformBucketLevelAccess = ubla
	}
	if ubla.Enabled && ubla.LockedTime == "" {
		t, err := time.Parse(time.RFC3339, now)
		if err != nil {
			return err
		}
		ubla.LockedTime = timeString(t.AddDate(0, 0, 90))
	} else if !ubla.Enabled {
		ubla.LockedTime = ""
	}
	if b.IamConfiguration.PublicAccessPrevention == "" {
		b.IamConfiguration.PublicAccessPrevention = "inherited"
	}
	b.IamConfiguration.BucketPolicyOnly = &raw.BucketIamConfigurationBucketPolicyOnly{
		Enabled: ubla.Enabled, LockedTime: ubla.LockedTime,
	}
	return nil
}

func checkRule(rule *raw.BucketLifecycleRule) error {
	if rule.Action == nil || rule.Condition == nil {
		return invalid("A lifecycle rule must have an action and a condition.")
	}
	switch rule.Action.Type {
	case "Delete", "AbortIncompleteMultipartUpload":
	case "SetStorageClass":
		if !storageClasses[rule.Action.StorageClass] {
			return invalid("Invalid storage class %q in a lifecycle rule.", rule.Action.StorageClass)
		}
	default:
		return invalid("Invalid lifecycle action %q.", rule.Action.Type)
	}
	if data, err := json.Marshal(rule.Condition); err != nil {
		return err
	} else if string(data) == "{}" {
		return invalid("A lifecycle rule's condition must not be empty.")
	}
	return nil
}

// bucketJSON completes b for a reply.
func bucketJSON(c *call, b *raw.Bucket) *raw.Bucket {
	b.Kind, b.Id = "storage#bucket", b.Name
	b.Etag = base64.StdEncoding.EncodeToString(strconv.AppendInt(nil, b.Metageneration, 10))
	b.SelfLink = c.base() + "/storage/v1/b/" + b.Name
	// The service says these even where they are zero.
	if b.SoftDeletePolicy != nil {
		b.SoftDeletePolicy.ForceSendFields = []string{"RetentionDurationSeconds"}
	}
	b.IamConfiguration.UniformBucketLevelAccess.ForceSendFields = []string{"Enabled"}
	b.IamConfiguration.BucketPolicyOnly.ForceSendFields = []string{"Enabled"}
	return b
}

func timeString(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }

func (s *Server) getBucket(c *call) error {
	p, err := preconditions(c.q, "")
	if err != nil {
		return err
	}
	b, err := findBucket(c.r.Context(), s.db, c.bucket)
	if err != nil {
		return err
	}
	if p.MetagenerationMatch != nil && *p.MetagenerationMatch != b.Metageneration {
		return errPrecondition
	}
	if p.MetagenerationNotMatch != nil && *p.MetagenerationNotMatch == b.Metageneration {
		return errNotModified
	}
	return c.reply(bucketJSON(c, b))
}

// patchBucket is PATCH and, with all writable fields replaced, PUT.
func (s *Server) patchBucket(c *call) error {
	p, err := preconditions(c.q, "")
	if err != nil {
		return err
	}
	var body json.RawMessage
	if err := c.body(&body); err != nil {
		return err
	}
	ctx := c.r.Context()
	var b *raw.Bucket
	err = s.update(ctx, func(t *txn) error {
		old, err := findBucket(ctx, t, c.bucket)
		if err != nil {
			return err
		}
		if err := p.check(old.Generation, old.Metageneration); err != nil {
			return err
		}
		if b, err = patch(old, body, bucketWritable, c.r.Method == http.MethodPut); err != nil {
			return err
		}
		if b.StorageClass == "" {
			b.StorageClass = "STANDARD"
		}
		if b.HierarchicalNamespace != nil && b.HierarchicalNamespace.Enabled && b.Versioning != nil && b.Versioning.Enabled {
			return invalid("Object versioning cannot be enabled on a bucket with a hierarchical namespace.")
		}
		now := timeString(t.now)
		if err := checkBucket(old, b, now); err != nil {
			return err
		}
		b.Metageneration++
		b.Updated = now
		return t.putBucket(b)
	})
	if err != nil {
		return err
	}
	return c.reply(bucketJSON(c, b))
}

func (s *Server) deleteBucket(c *call) error {
	p, err := preconditions(c.q, "")
	if err != nil {
		return err
	}
	ctx := c.r.Context()
	err = s.update(ctx, func(t *txn) error {
		b, err := findBucket(ctx, t, c.bucket)
		if err != nil {
			return err
		}
		if err := p.check(b.Generation, b.Metageneration); err != nil {
			return err
		}
		var full bool
		if err := t.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM objects WHERE bucket = ?)`, c.bucket).Scan(&full); err != nil {
			return err
		}
		if full {
			return conflict("The bucket you tried to delete is not empty.")
		}
		rows, err := t.QueryContext(ctx, `DELETE FROM uploads WHERE bucket = ? RETURNING data`, c.bucket)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var data string
			if err := rows.Scan(&data); err != nil {
				return err
			}
			t.dead = append(t.dead, data)
		}
		if err := rows.Err(); err != nil {
			return err
		}
		_, err = t.ExecContext(ctx, `DELETE FROM buckets WHERE name = ?`, c.bucket)
		return err
	})
	if err != nil {
		return err
	}
	if s.iam != nil {
		s.iam.ForgetBucket(c.bucket)
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) listBuckets(c *call) error {
	if c.q.Get("project") != s.project {
		return notFound("The requested project was not found.")
	}
	limit, err := pageSize(c.q.Get("maxResults"))
	if err != nil {
		return err
	}
	from, err := decodeToken(c.q.Get("pageToken"))
	if err != nil {
		return err
	}
	prefix := c.q.Get("prefix")
	rows, err := s.db.QueryContext(c.r.Context(), `SELECT attrs FROM buckets WHERE name >= ? AND name >= ? ORDER BY name LIMIT ?`, from.name, prefix, limit+1)
	if err != nil {
		return err
	}
	defer rows.Close()
	page := &raw.Buckets{Kind: "storage#buckets"}
	for rows.Next() {
		var attrs []byte
		if err := rows.Scan(&attrs); err != nil {
			return err
		}
		b := new(raw.Bucket)
		if err := json.Unmarshal(attrs, b); err != nil {
			return err
		}
		if !strings.HasPrefix(b.Name, prefix) {
			break
		}
		if len(page.Items) == limit {
			page.NextPageToken = position{name: b.Name}.token()
			break
		}
		page.Items = append(page.Items, bucketJSON(c, b))
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return c.reply(page)
}

// pageSize reads maxResults: at most, and by default, 1,000.
func pageSize(value string) (int, error) {
	if value == "" {
		return 1000, nil
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 {
		return 0, invalid("Invalid value for maxResults: %q.", value)
	}
	if n == 0 || n > 1000 {
		n = 1000
	}
	return n, nil
}
