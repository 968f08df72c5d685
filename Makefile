# Everything a fresh clone needs: `make demo` and `make test` set the environment up themselves, once.
PYTHON ?= python3
VENV   ?= .venv
OUT    ?= out/demo
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test lint bench-cpu clean

setup: $(STAMP)

# torch goes first and pinned: where pip finds a CPU build of that release it takes it, everywhere else this is
# the ordinary wheel. The package itself is installed editable, so the tests see the working tree.
$(STAMP): pyproject.toml
	@echo "==> setting up $(VENV) (torch, diffusers, transformers: some minutes on a first run)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off "torch==2.13.0"
	$(BIN)/python -m pip install --progress-bar off -e ".[diffusers,cli,bench,test]"
	@touch $(STAMP)

# A dense and a Spark run of a tiny random-weight MiniMax-H3, no download: two clips, a contact sheet,
# a report.
demo: $(STAMP)
	$(BIN)/solspark env
	$(BIN)/solspark generate --model tiny --method spark --compare dense --height 192 --width 320 --out $(OUT)

# One thread a process: two workers with two threads each fight over two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench-cpu: $(STAMP)
	$(BIN)/solspark bench --problem tiny --device cpu

clean:
	rm -rf $(VENV) out build dist
