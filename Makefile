# make demo: set everything up, show both lanes side by side, stop.   make test: set up what is missing, test all.
# make soak: the lease table under a minute of kills, freezes and a restart, counted.
.PHONY: setup model demo test soak up lint

MODEL := .anchorleg/models/smollm2-135m-instruct

setup:
	@scripts/setup

model: setup
	@test -f $(MODEL)/config.json || .venv/bin/anchorleg model --directory $(MODEL)

demo: model
	@.venv/bin/anchorleg demo --ports auto

test: model lint
	@scripts/test

soak: setup
	@.venv/bin/python -m tests.soak

up: model
	@.venv/bin/anchorleg up

lint: setup
	@scripts/lint
	@scripts/typecheck
