package main

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// how has the certificates and the user for an address with TLS.
type how struct {
	tls            *tls.Config
	user, password string
}

var secured *how

func newSecured(ca, certificate, key, user, password string) *how {
	pem, err := os.ReadFile(ca)
	if err != nil {
		fail("%v", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		fail("%s holds no certificate", ca)
	}
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		fail("%v", err)
	}
	return &how{&tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, ServerName: "localhost"}, user, password}
}

// refused checks that there is an error with this text.
func refused(what, text string, err error) {
	if err == nil || !strings.Contains(err.Error(), text) {
		fail("%s: wanted an error with %q, got %v", what, text, err)
	}
	checks++
}

// as returns a client with changed options.
func as(protocol int, change func(*redis.Options)) *redis.Client {
	o := options(protocol)
	change(o)
	return redis.NewClient(o)
}

// verified checks that the library verifies the certificate, and that the listener verifies the client's.
func verified() {
	unknown := as(3, func(o *redis.Options) { o.TLSConfig = secured.tls.Clone(); o.TLSConfig.RootCAs = x509.NewCertPool() })
	refused("a certificate of an unknown authority", "certificate signed by unknown authority", unknown.Ping(ctx).Err())
	anonymous := as(3, func(o *redis.Options) { o.TLSConfig = secured.tls.Clone(); o.TLSConfig.Certificates = nil })
	refused("a client without a certificate", "", anonymous.Ping(ctx).Err())
}

// rights checks the rights of a user who may only read its own keys.
func rights(full *redis.Client, protocol int) {
	result("ACL WHOAMI", any(secured.user))(full.Do(ctx, "ACL", "WHOAMI").Result())
	result("MSET", "OK")(full.MSet(ctx, "public:a", 1, "public:b", 2, "secret", 3).Result())
	r := as(protocol, func(o *redis.Options) { o.Username = "reader" })
	result("ACL WHOAMI of a restricted user", any("reader"))(r.Do(ctx, "ACL", "WHOAMI").Result())
	result("MGET of what a user may read", []any{"1", "2"})(r.MGet(ctx, "public:a", "public:b").Result())
	refused("GET of another's key", "NOPERM", r.Get(ctx, "secret").Err())
	refused("MGET of another's key", "NOPERM", r.MGet(ctx, "public:a", "secret").Err())
	refused("SET by a reader", "'set' command", r.Set(ctx, "public:a", 9, 0).Err())
	refused("FLUSHALL by a reader", "'flushall' command", r.FlushAll(ctx).Err())
	_, err := r.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		pipe.Get(ctx, "public:a")
		pipe.Set(ctx, "public:a", 9, 0)
		return nil
	})
	refused("a transaction of a reader", "", err)
	result("what it would have changed", "1")(r.Get(ctx, "public:a").Result())

	p := r.Subscribe(ctx, "public:news")
	if got, err := p.ReceiveTimeout(ctx, 10*time.Second); err != nil {
		fail("SUBSCRIBE to what a user may hear: %v %v", got, err)
	}
	result("PUBLISH", int64(1))(full.Publish(ctx, "public:news", "x").Result())
	if got, err := p.ReceiveMessage(ctx); err != nil || got.Payload != "x" {
		fail("a message: %v %v", got, err)
	}
	_ = p.Close()
	p = r.Subscribe(ctx, "secret")
	_, err = p.ReceiveTimeout(ctx, 10*time.Second)
	refused("SUBSCRIBE to another channel", "NOPERM", err)
	_ = p.Close()

	refused("a wrong password", "WRONGPASS", as(protocol, func(o *redis.Options) { o.Password = "wrong" }).Ping(ctx).Err())
	refused("a client without a name", "NOAUTH", as(protocol, func(o *redis.Options) { o.Username, o.Password = "", "" }).Ping(ctx).Err())
	_ = r.Close()
}
