package store

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/sluicehpc/sluice/api"
)

// Enrolment is a VM that has a certificate. It is dropped when the VM is gone.
type Enrolment struct {
	Instance   string    `json:"instance"` // numeric id
	Node       string    `json:"node"`     // the VM's name
	Role       api.Role  `json:"role"`
	Key        string    `json:"key"` // SHA-256 of the public key in hex
	EnrolledAt time.Time `json:"enrolled_at"`
	Until      time.Time `json:"until"` // the end of its newest certificate
}

// Enrolments returns all of them.
func (s *Store) Enrolments(ctx context.Context) ([]Enrolment, error) {
	return docs[Enrolment](ctx, s, "SELECT doc FROM enrolments")
}

// PutEnrolment stores e, and drops what earlier VMs of the same name left.
func (s *Store) PutEnrolment(ctx context.Context, e Enrolment) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.Exec("DELETE FROM enrolments WHERE node = ?", e.Node); err != nil {
			return fmt.Errorf("store enrolment of %s: %w", e.Node, err)
		}
		if _, err := tx.Exec("INSERT OR REPLACE INTO enrolments (instance, node, doc) VALUES (?, ?, ?)", e.Instance, e.Node, encode(e)); err != nil {
			return fmt.Errorf("store enrolment of %s: %w", e.Node, err)
		}
		return nil
	})
}

// DropEnrolments forgets VMs, so that their certificates count no more.
func (s *Store) DropEnrolments(ctx context.Context, instances ...string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, id := range instances {
			if _, err := tx.Exec("DELETE FROM enrolments WHERE instance = ?", id); err != nil {
				return fmt.Errorf("drop enrolment of instance %s: %w", id, err)
			}
		}
		return nil
	})
}
