package agent

import (
	"net"
	"os"
)

// notifySystemd sends one message of sd_notify(3), or nothing outside systemd.
func notifySystemd(message string) error {
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
