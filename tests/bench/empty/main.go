// Command empty does nothing: the least that a process written in Go costs.
package main

func main() {}
