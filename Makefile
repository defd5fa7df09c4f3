# `make demo` and `make test` need nothing but make and python3, 3.11 or newer for the versions in constraints.txt:
# they set up $(VENV) themselves.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
DEMO = runs/demo
JOBS ?= 2

.PHONY: help demo test test-slow mutants lint types docs site recording results benchmarks zoo-check results-defaults bench clean

help:
	@echo "make demo       train IMPALA on CartPole-v1 until it is solved, evaluate it, draw its curve"
	@echo "make test       quick tests         make test-slow  kill tests, full resume matrix, long checks"
	@echo "make mutants    apply the faults of tests/mutants.yaml and count those that no test notices"
	@echo "make lint       ruff                make types      mypy"
	@echo "make docs       write the generated pages and type stubs"
	@echo "make site       the documentation as pages to open: build/site/index.html"
	@echo "make recording  a terminal session as an animated picture: docs/images/session.svg"
	@echo "make results    run the learning gates that are not recorded, then draw docs/results.md"
	@echo "make benchmarks CELLS=ppo/hopper:103   repeat a cell of scripts/benchmarks.yaml; without CELLS, all that are missing (days)"
	@echo "make zoo-check  play every packaged policy and compare it with its card"
	@echo "make results-defaults  our defaults next to Stable-Baselines3's, where nothing was tuned (hours)"
	@echo "make bench      every benchmark in benchmarks/, next to Stable-Baselines3 where it has the same;"
	@echo "                next to Tianshou too with TIANSHOU=FOLDER (benchmarks/README.md)"

# Installation, each once: a stamp file stands for what was installed and from which versions of these files.
INPUTS = pyproject.toml constraints.txt

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	@echo "installing rl-training into $(VENV) (once; torch is large, this takes a few minutes)"
	$(INSTALL) torch
	$(INSTALL) -e '.[results]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV) (once)"
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(INSTALL) -e '.[results,bench]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/rl-training train --config impala/cartpole --output-dir $(DEMO) \
	    --set eval_interval=10000 --set 'early_stopping={threshold: 475, patience: 2}'
	@set -e; run=$$(ls -td $(DEMO)/*/ | head -n 1); run=$${run%/}; \
	echo; echo "evaluating the final weights on 100 episodes that were not used so far"; \
	$(BIN)/rl-training eval --checkpoint "$$run/checkpoints/latest.ckpt" --num-episodes 100 --seed 12345; \
	$(BIN)/python scripts/render_results.py --run "$$run" >/dev/null; \
	echo; echo "run:        $$run"; echo "curve:      $$run/curve.png"; \
	echo "checkpoint: $$run/checkpoints/latest.ckpt"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow

mutants: $(VENV)/.installed-dev
	$(BIN)/python scripts/mutants.py --jobs $(JOBS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python scripts/generate_docs.py
	$(BIN)/python scripts/render_results.py

recording: $(VENV)/.installed
	$(INSTALL) -e '.[export,tune]'
	$(BIN)/python scripts/record_session.py

site: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

results: $(VENV)/.installed
	$(BIN)/python scripts/run_gates.py --jobs $(JOBS)
	$(BIN)/python scripts/render_results.py
	$(BIN)/python scripts/generate_docs.py

benchmarks: $(VENV)/.installed-dev
	$(BIN)/python scripts/run_benchmarks.py $(CELLS) $(if $(CELLS),--again) --jobs $(JOBS)
	$(BIN)/python scripts/render_results.py

zoo-check: $(VENV)/.installed-dev
	$(BIN)/python scripts/zoo.py check

results-defaults: $(VENV)/.installed-bench
	$(BIN)/python scripts/compare_defaults.py sb3 ours --jobs $(JOBS)
	$(BIN)/python scripts/render_results.py

bench: $(VENV)/.installed-bench
	@set -e; for file in benchmarks/bench_*.py benchmarks/compare_sb3.py; do echo "== $$file"; $(BIN)/python $$file; done
	@echo "== benchmarks/compare_replay.py"
	@$(BIN)/python benchmarks/compare_replay.py $(if $(TIANSHOU),--tianshou $(TIANSHOU),--only dqn,qr_dqn,qr_dqn_200,sac,td3)

clean:
	rm -rf $(DEMO) .pytest_cache .mypy_cache .ruff_cache build dist
