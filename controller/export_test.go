package controller

import "context"

// RemoveExpired is one round of what sluiced does every ten minutes.
func (c *Controller) RemoveExpired(ctx context.Context) error { return c.removeExpired(ctx) }
