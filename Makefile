# make demo: set everything up, show both lanes side by side, stop.   make test: set up what is missing, test all.
# make soak: the lease table under a minute of kills, freezes and a restart, counted.
# make endurance: what the tests do a few times to a real stack, as clients that leave at the worst moments, many times over.
# make fidelity: the same requests down both lanes of a real stack, compared field by field, in a table.
.PHONY: setup model demo test tests stacks computing waiting soak endurance fidelity up lint

MODEL := .anchorleg/models/smollm2-135m-instruct
COMPUTING := tests/unit/engine tests/unit/gateway

setup:
	@scripts/setup

model: setup
	@test -f $(MODEL)/config.json || .venv/bin/anchorleg model --directory $(MODEL)

demo: model
	@.venv/bin/anchorleg demo --ports auto

# Real stacks take both cores. Of what is left one half computes, and the other mostly waits: together they take as long as one.
test: model
	@passed=yes; \
	$(MAKE) --no-print-directory --jobs=2 lint stacks || passed=; \
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target computing waiting || passed=; \
	test -n "$$passed"

tests: stacks computing waiting

stacks: model
	@scripts/test tests/e2e tests/fidelity

computing: model
	@scripts/test $(COMPUTING)

waiting: model
	@scripts/test tests $(addprefix --ignore=,tests/e2e tests/fidelity $(COMPUTING))

soak: setup
	@.venv/bin/python -m tests.soak

endurance: model
	@scripts/test tests/e2e -m endurance

fidelity: model
	@.venv/bin/python -m tests.fidelity

up: model
	@.venv/bin/anchorleg up

lint: setup
	@scripts/lint
	@scripts/typecheck
