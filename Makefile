# make help lists the targets.
SHELL := /bin/bash
export CGO_ENABLED := 0

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X github.com/sluicehpc/sluice/internal/version.Version=$(VERSION)
# Unit tests; what boots the sandbox's VMs with Slurm in them lives in tests/.
UNIT = $(shell go list ./... 2>/dev/null | grep -v '/tests')

.PHONY: help deps build build-arm64 demo demos arm64 check test unit fuzz e2e lint bench campaign clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

deps: ## install the Debian packages and Go modules that are missing
	@scripts/deps.sh

build: ## build the binaries into bin/
	@mkdir -p bin
	@echo 'building (from a cold cache this takes some minutes)'
	@go build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/... ./examples/trainer

build-arm64: ## build the binaries for arm64 into bin/arm64/
	@mkdir -p bin/arm64
	@echo 'building for arm64 (from a cold cache this takes some minutes)'
	@GOARCH=arm64 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/arm64/ ./cmd/... ./examples/trainer

demo: deps build ## run the main job in a sandbox and show it live
	@bin/sluice sandbox demo --name demo --report .sandbox/demo/report.json

demos: deps build ## run the main job on the other versions of Slurm: 22.05 (with a kernel of Rocky 8's) and 26.05
	bin/sluice sandbox demo --name demo-22-05 --slurm 22.05 --kernel 4.18 --report .sandbox/demo-22.05/report.json
	bin/sluice sandbox demo --name demo-26-05 --slurm 26.05 --report .sandbox/demo-26.05/report.json

arm64: deps build-arm64 ## run the arm64 binaries, emulated
	@scripts/smoke-arm64.sh

check: build lint unit ## the inner loop: lint and unit tests

test: deps build lint unit fuzz e2e ## all tests, those on real Slurm included

unit: ## the unit tests
	go test -timeout 10m $(UNIT)

fuzz: ## attack the sandbox's APIs with nonsense, some seconds each
	@for api in compute iam lustre metadata monitoring storage; do \
	  go test ./sandbox/$$api -run '^$$' -fuzz '^FuzzHTTP$$' -fuzztime 4s -fuzzminimizetime 5s || exit 1; done

e2e: ## the tests on real Slurm
	go test -p 1 -count=1 -timeout 18m ./tests/...

lint: ## gofmt, go vet, staticcheck, shellcheck, systemd-analyze verify
	@scripts/lint.sh

bench: deps build ## measure speed and memory against the peers; tables and .bench/*.json
	go run ./tests/bench/cmd

campaign: deps build ## the longer tests: large objects, many rounds
	SLUICE_CAMPAIGN=1 go test -count=1 -p 1 -timeout 60m ./sandbox/storage/...

clean: ## remove what was built, every sandbox of this machine and its cache
	@if [ -x bin/sluice ]; then bin/sluice sandbox down --all; fi
	rm -rf bin .sandbox .bench .campaign "$${SLUICE_ROOT}/var/cache/sluice"
