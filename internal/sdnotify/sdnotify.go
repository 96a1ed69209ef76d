// Package sdnotify tells systemd how a daemon is (sd_notify(3)).
package sdnotify

import (
	"net"
	"os"
)

// Send sends one message such as "READY=1"; it does nothing when systemd did not ask.
func Send(message string) error {
	// A name that begins with @ is an abstract socket, which package net knows too.
	name := os.Getenv("NOTIFY_SOCKET")
	if name == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write([]byte(message))
	return err
}
