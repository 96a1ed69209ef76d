package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"github.com/sluicehpc/sluice/nodes"
)

func docs[T any](ctx context.Context, s *Store, query string) ([]T, error) {
	rows, err := s.db.QueryContext(ctx, query)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	defer rows.Close()
	var list []T
	for rows.Next() {
		var doc string
		var v T
		if err := rows.Scan(&doc); err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
		if err := json.Unmarshal([]byte(doc), &v); err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
		list = append(list, v)
	}
	return list, rows.Err()
}

// Nodes returns the nodes that were ever asked for.
func (s *Store) Nodes(ctx context.Context) ([]nodes.Node, error) {
	return docs[nodes.Node](ctx, s, "SELECT doc FROM nodes")
}

func putNodes(tx *sql.Tx, list []nodes.Node) error {
	for _, n := range list {
		if _, err := tx.Exec("INSERT OR REPLACE INTO nodes (name, doc) VALUES (?, ?)", n.Name, encode(n)); err != nil {
			return fmt.Errorf("store node %s: %w", n.Name, err)
		}
	}
	return nil
}

// PutNodes stores nodes, all or none.
func (s *Store) PutNodes(ctx context.Context, list ...nodes.Node) error {
	return s.write(ctx, func(tx *sql.Tx) error { return putNodes(tx, list) })
}

// Batches returns the bulkInserts at work.
func (s *Store) Batches(ctx context.Context) ([]nodes.Batch, error) {
	return docs[nodes.Batch](ctx, s, "SELECT doc FROM batches")
}

// PutBatch stores an intent.
func (s *Store) PutBatch(ctx context.Context, b nodes.Batch) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.Exec("INSERT OR REPLACE INTO batches (request_id, doc) VALUES (?, ?)", b.RequestID, encode(b))
		return err
	})
}

// DropBatch forgets an intent and stores what became of its nodes.
func (s *Store) DropBatch(ctx context.Context, requestID string, list ...nodes.Node) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		if _, err := tx.Exec("DELETE FROM batches WHERE request_id = ?", requestID); err != nil {
			return err
		}
		return putNodes(tx, list)
	})
}

var _ nodes.Store = (*Store)(nil)
