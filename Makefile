# make demo: set everything up, show both lanes side by side, stop.   make test: set up what is missing, test all.
.PHONY: setup model demo test up lint

MODEL := .anchorleg/models/smollm2-135m-instruct

setup:
	@scripts/setup

model: setup
	@test -f $(MODEL)/config.json || .venv/bin/anchorleg model --directory $(MODEL)

demo: model
	@.venv/bin/anchorleg demo --ports auto

test: model lint
	@scripts/test

up: model
	@.venv/bin/anchorleg up

lint: setup
	@scripts/lint
	@scripts/typecheck
