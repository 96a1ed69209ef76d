package controller

import "context"

// RemoveExpired is one round of what sluiced does every ten minutes.
func (c *Controller) RemoveExpired(ctx context.Context) error { return c.removeExpired(ctx) }

// RestoreDown is one round of what sluiced does every half minute.
func (c *Controller) RestoreDown(ctx context.Context) error { return c.restoreDown(ctx) }

// ForgetGone is one round of what sluiced does every half minute.
func (c *Controller) ForgetGone() error { return c.forgetGone(context.Background()) }
