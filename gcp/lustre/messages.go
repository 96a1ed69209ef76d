package lustre

import (
	"encoding/json"
	"fmt"
	"time"
)

// The messages are those of google.cloud.lustre.v1 in their JSON form: lowerCamel names, int64 as
// strings, enums as names, times as RFC 3339.

// Instance is a Managed Lustre instance.
type Instance struct {
	Name                     string            `json:"name,omitempty"` // projects/P/locations/ZONE/instances/ID
	Filesystem               string            `json:"filesystem,omitempty"`
	CapacityGib              int64             `json:"capacityGib,string,omitempty"`
	PerUnitStorageThroughput int64             `json:"perUnitStorageThroughput,string,omitempty"` // MB/s per TiB; 0: dynamic tier
	Network                  string            `json:"network,omitempty"`                         // projects/P/global/networks/N
	State                    State             `json:"state,omitempty"`                           // output
	StateReason              string            `json:"stateReason,omitempty"`                     // output
	MountPoint               string            `json:"mountPoint,omitempty"`                      // output: IP@tcp:/FS
	UID                      string            `json:"uid,omitempty"`                             // output; another one after re-creation
	CreateTime               time.Time         `json:"createTime,omitzero"`                       // output
	UpdateTime               time.Time         `json:"updateTime,omitzero"`                       // output
	Description              string            `json:"description,omitempty"`
	Labels                   map[string]string `json:"labels,omitempty"`
	GkeSupportEnabled        bool              `json:"gkeSupportEnabled,omitempty"` // deprecated
	KmsKey                   string            `json:"kmsKey,omitempty"`
	PlacementPolicy          string            `json:"placementPolicy,omitempty"`

	AccessRulesOptions *AccessRulesOptions `json:"accessRulesOptions,omitempty"`
	MaintenancePolicy  json.RawMessage     `json:"maintenancePolicy,omitempty"` // kept as it came; Sluice does not set it
	DynamicTierOptions *DynamicTierOptions `json:"dynamicTierOptions,omitempty"`
}

// State is an instance's state.
type State string

// The states of an instance. While it is Upgrading, I/O stalls for minutes: wait, do not fail.
const (
	StateActive    State = "ACTIVE"
	StateCreating  State = "CREATING"
	StateDeleting  State = "DELETING"
	StateUpgrading State = "UPGRADING"
	StateRepairing State = "REPAIRING"
	StateStopped   State = "STOPPED"
	StateUpdating  State = "UPDATING" // deprecated
	StateSuspended State = "SUSPENDED"
)

// AccessRulesOptions says whose root is squashed.
type AccessRulesOptions struct {
	AccessRules       []AccessRule `json:"accessRules,omitempty"`
	DefaultSquashMode string       `json:"defaultSquashMode,omitempty"` // NO_SQUASH or ROOT_SQUASH
	DefaultSquashUID  int64        `json:"defaultSquashUid,omitempty"`  // unset with NO_SQUASH
	DefaultSquashGID  int64        `json:"defaultSquashGid,omitempty"`  // unset with NO_SQUASH
}

// AccessRule exempts address ranges from the default squash mode.
type AccessRule struct {
	Name            string   `json:"name,omitempty"`
	IPAddressRanges []string `json:"ipAddressRanges,omitempty"`
	SquashMode      string   `json:"squashMode,omitempty"` // NO_SQUASH
}

// DynamicTierOptions chooses the dynamic tier.
type DynamicTierOptions struct {
	Mode string `json:"mode,omitempty"` // DISABLED or DEFAULT_CACHE
}

// GcsPath is a bucket prefix.
type GcsPath struct {
	URI string `json:"uri"` // gs://BUCKET or gs://BUCKET/PREFIX/ with the slash
}

// LustrePath is a directory of the instance.
type LustrePath struct {
	Path string `json:"path,omitempty"` // absolute; empty: /
}

// ImportDataRequest copies from a bucket to an instance. A destination other than / must exist.
type ImportDataRequest struct {
	Name           string      `json:"name"` // of the instance
	GcsPath        *GcsPath    `json:"gcsPath,omitempty"`
	LustrePath     *LustrePath `json:"lustrePath,omitempty"`
	RequestID      string      `json:"requestId,omitempty"`
	ServiceAccount string      `json:"serviceAccount,omitempty"` // empty: the service agent
}

// ExportDataRequest copies from an instance to a bucket.
type ExportDataRequest struct {
	Name           string      `json:"name"` // of the instance
	LustrePath     *LustrePath `json:"lustrePath,omitempty"`
	GcsPath        *GcsPath    `json:"gcsPath,omitempty"`
	RequestID      string      `json:"requestId,omitempty"`
	ServiceAccount string      `json:"serviceAccount,omitempty"` // empty: the service agent
}

// CreateInstanceRequest makes an instance.
type CreateInstanceRequest struct {
	Parent     string // projects/P/locations/ZONE
	InstanceID string
	Instance   *Instance
	RequestID  string
}

// UpdateInstanceRequest changes the fields that the mask names ("capacityGib", "labels").
type UpdateInstanceRequest struct {
	Instance   *Instance // its Name says which
	UpdateMask []string
	RequestID  string
}

// DeleteInstanceRequest deletes an instance with all its data.
type DeleteInstanceRequest struct {
	Name      string
	RequestID string
}

// Operation is a long-running operation.
type Operation struct {
	Name     string             `json:"name"`
	Metadata *OperationMetadata `json:"metadata,omitempty"`
	Done     bool               `json:"done,omitempty"`
	Error    *OperationError    `json:"error,omitempty"`    // set when it failed
	Response json.RawMessage    `json:"response,omitempty"` // set when it succeeded
}

// Err is the operation's failure, or nil: also while it runs. A transfer whose objects failed has
// none; see TransferCounters.
func (o *Operation) Err() error {
	if o.Error == nil {
		return nil
	}
	return fmt.Errorf("operation %s: %w", o.Name, o.Error)
}

// OperationMetadata is the metadata of every kind of operation (OperationMetadata,
// ImportDataMetadata, ExportDataMetadata; Type says which).
type OperationMetadata struct {
	Type                  string            `json:"@type,omitempty"`
	Transfer              *TransferMetadata `json:"operationMetadata,omitempty"` // of imports and exports
	CreateTime            time.Time         `json:"createTime,omitzero"`
	EndTime               time.Time         `json:"endTime,omitzero"`
	Target                string            `json:"target,omitempty"` // the instance's name
	Verb                  string            `json:"verb,omitempty"`   // "create"; imports have none
	StatusMessage         string            `json:"statusMessage,omitempty"`
	RequestedCancellation bool              `json:"requestedCancellation,omitempty"`
	APIVersion            string            `json:"apiVersion,omitempty"`
}

// The types of metadata.
const (
	TypeOperation = "type.googleapis.com/google.cloud.lustre.v1.OperationMetadata"
	TypeImport    = "type.googleapis.com/google.cloud.lustre.v1.ImportDataMetadata"
	TypeExport    = "type.googleapis.com/google.cloud.lustre.v1.ExportDataMetadata"
)

// TransferMetadata says what a transfer copies and how far it is.
type TransferMetadata struct {
	SourceGcsPath         *GcsPath         `json:"sourceGcsPath,omitempty"`
	SourceLustrePath      *LustrePath      `json:"sourceLustrePath,omitempty"`
	DestinationGcsPath    *GcsPath         `json:"destinationGcsPath,omitempty"`
	DestinationLustrePath *LustrePath      `json:"destinationLustrePath,omitempty"`
	Counters              TransferCounters `json:"counters"`
	TransferType          string           `json:"transferType,omitempty"` // IMPORT or EXPORT
	ErrorSummaries        []ErrorSummary   `json:"errorSummaries,omitempty"`
}

// TransferCounters are the only way to know whether a transfer succeeded: one that is done without
// an error may have failed objects.
type TransferCounters struct {
	FoundObjectsCount   int64 `json:"foundObjectsCount,string,omitempty"` // to be copied: without the skipped ones
	BytesFoundCount     int64 `json:"bytesFoundCount,string,omitempty"`
	ObjectsSkippedCount int64 `json:"objectsSkippedCount,string,omitempty"` // unchanged at the destination
	BytesSkippedCount   int64 `json:"bytesSkippedCount,string,omitempty"`
	ObjectsCopiedCount  int64 `json:"objectsCopiedCount,string,omitempty"`
	BytesCopiedCount    int64 `json:"bytesCopiedCount,string,omitempty"`
	ObjectsFailedCount  int64 `json:"objectsFailedCount,string,omitempty"`
	BytesFailedCount    int64 `json:"bytesFailedCount,string,omitempty"`
}

// ErrorSummary counts one kind of failure and shows up to five examples.
type ErrorSummary struct {
	ErrorCode       string          `json:"errorCode,omitempty"` // name of a google.rpc.Code
	ErrorCount      int64           `json:"errorCount,string,omitempty"`
	ErrorLogEntries []ErrorLogEntry `json:"errorLogEntries,omitempty"`
}

// ErrorLogEntry is one object that failed.
type ErrorLogEntry struct {
	URI          string   `json:"uri,omitempty"`
	ErrorDetails []string `json:"errorDetails,omitempty"`
}

// OperationError is a google.rpc.Status: why an operation failed.
type OperationError struct {
	Code    int    `json:"code"` // google.rpc.Code: 1 cancelled, 5 not found, …
	Message string `json:"message,omitempty"`
}

func (e *OperationError) Error() string { return fmt.Sprintf("%s (code %d)", e.Message, e.Code) }

// Cancelled is the code of an operation that was cancelled.
const Cancelled = 1

// Location is a zone with Managed Lustre.
type Location struct {
	Name       string            `json:"name"`
	LocationID string            `json:"locationId"`
	Labels     map[string]string `json:"labels,omitempty"`
}
