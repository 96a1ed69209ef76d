package train

import "math"

// adam is the optimizer of Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), with its default constants.
type adam struct {
	m, v   []float32 // running means of the gradient and of its square
	b1, b2 float64   // beta1^t and beta2^t
}

const (
	beta1   = 0.9
	beta2   = 0.999
	epsilon = 1e-8
)

func newAdam(n int) *adam {
	return &adam{m: make([]float32, n), v: make([]float32, n), b1: 1, b2: 1}
}

// step moves the weights against the gradient times scale.
func (a *adam) step(params, grad []float32, scale float32, rate float64) {
	a.b1 *= beta1
	a.b2 *= beta2
	lr := float32(rate * math.Sqrt(1-a.b2) / (1 - a.b1))
	eps := float32(epsilon * math.Sqrt(1-a.b2))
	for i, g := range grad {
		g *= scale
		a.m[i] += (1 - beta1) * (g - a.m[i])
		a.v[i] += (1 - beta2) * (g*g - a.v[i])
		params[i] -= lr * a.m[i] / (float32(math.Sqrt(float64(a.v[i]))) + eps)
	}
}
