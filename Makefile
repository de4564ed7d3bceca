# make lab    opens the course in JupyterLab, in a copy that is yours: the folder my/
# make test   lints, runs the tests, and runs every lesson against its stored outputs; it also
#             installs the systems of the lesson real_tools, one of which needs a C++ compiler (g++);
#             to leave them out: make test WITHOUT_TOOLS=1
# make timing    runs each notebook alone, where the times that it measures must hold, too; some of
#             them: make timing NOTEBOOKS="notebooks/06*.ipynb"
# make soak   runs the tests of the night: hundreds of launches, interrupts and kills; and the cases,
#             such as those on the other backend, that make test leaves out
# make browser   builds the site, and looks at it and at lesson 1 in Chromium, as a learner would
# make site   builds the site and the lab, to read and try without installing: build/site (needs npm)
# All make the environment first when it is missing or out of date.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST := $(VENV)/.test
TOOLS := $(VENV)/.tools
SITE := $(VENV)/.site

# The folder that `make lab` opens. Authors: make lab LAB_NOTEBOOKS=notebooks
LAB_NOTEBOOKS ?= my

# Extra arguments for JupyterLab and pytest: make lab LAB_ARGS="--port 9000"
LAB_ARGS ?=
TEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup lab test compiler timing soak lint notebooks img browser site
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile
	@echo "make setup | lint | img (draw the pictures again)"
	@echo "make notebooks (run them again, in place; it also installs the systems of real_tools)"

# ---- the environment ----------------------------------------------------------------------

setup: $(TEST)

define BY_PIP
There is no torch by uv; why, it says above. So pip fetches it, in the build that its index has.
endef
export BY_PIP

# What a learner needs. Torch goes first: it is the one large download. uv chooses the build that
# fits this machine (for the CPU where there is no GPU), and keeps one that is there already.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "minidist needs Python 3.11 or later; try: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt uv && $(BIN)/uv pip install \
	    --python $(BIN)/python --torch-backend=auto -c constraints.txt torch \
	    || { echo "$$BY_PIP"; $(BIN)/python -m pip install -c constraints.txt torch; }
	$(BIN)/python -m pip install -c constraints.txt -e '.[course]'
	@touch $@

$(TEST): $(READY)
	$(BIN)/python -m pip install -c constraints.txt -e '.[course,test]'
	@touch $@

# The systems of the lesson real_tools. DeepSpeed's C++ is compiled here, once, into the folder
# .venv/torch_extensions: at its first use it would take minutes and, when killed, leave a lock.
define NO_TOOLS
The systems of the lesson real_tools are not there; why, it says above. No other lesson needs them:
  make lab                       works as it is
  make test WITHOUT_TOOLS=1      tests all the rest
endef
export NO_TOOLS

$(TOOLS): $(TEST) notebooks/scripts/build_deepspeed.py
	$(BIN)/python -m pip install -c constraints.txt -e '.[tools]' \
	    && $(BIN)/python notebooks/scripts/build_deepspeed.py || { echo "$$NO_TOOLS"; exit 1; }
	@touch $@

# ---- the course ---------------------------------------------------------------------------

# Jupyter prints the address. It also opens a browser, unless there is no screen to show one.
HAS_SCREEN := $(or $(DISPLAY),$(WAYLAND_DISPLAY),$(filter Darwin,$(shell uname -s)))

# notebooks/jupyter holds the course's settings of JupyterLab: lessons before folders, whole names, no
# news. What a learner has set in JupyterLab counts more.
lab: export JUPYTER_CONFIG_PATH := notebooks/jupyter$(addprefix :,$(JUPYTER_CONFIG_PATH))
lab: $(READY)
	$(if $(filter my,$(LAB_NOTEBOOKS)),@$(BIN)/python notebooks/my_copy.py)
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/$(LAB_NOTEBOOKS)/00_start.ipynb \
	    $(if $(HAS_SCREEN),,--no-browser) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

notebooks: $(TOOLS)  # the lesson real_tools fails without them
	$(BIN)/python notebooks/execute.py

img: $(READY)
	for script in $(sort $(wildcard img/*.py)); do $(BIN)/python $$script || exit 1; done

# ---- the site -----------------------------------------------------------------------------

$(SITE): $(READY)
	$(BIN)/python -m pip install -c constraints.txt -e '.[site]'
	@touch $@

# Formulas, and Python for the browser: each page loads them from the site itself.
NPM := build/npm
PYODIDE := pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm python_stdlib.zip pyodide-lock.json

$(NPM)/.ready: web/package.json
	@command -v npm > /dev/null || { echo "make site needs npm (Debian: apt install npm)"; exit 1; }
	mkdir -p $(NPM) && cp $< $(NPM)
	npm install --prefix $(NPM) --no-package-lock --ignore-scripts --no-audit --no-fund
	@touch $@

# Each time anew, so that -W tells all warnings, and nothing stays of a page that is no more.
site: $(SITE) $(NPM)/.ready
	rm -rf build/site build/doctrees
	$(BIN)/python web/stage.py . build/src
	$(BIN)/sphinx-build -q -W --keep-going -c web -d build/doctrees build/src build/site
	$(BIN)/python web/shrink.py build/site
	cp -r web/lab build/site/lab && mkdir build/site/lab/pyodide
	cp $(PYODIDE:%=$(NPM)/node_modules/pyodide/%) build/site/lab/pyodide
	$(BIN)/python web/bundle.py build/site/lab/lab.zip
	$(BIN)/python web/links.py build/site
	@echo "The site is in build/site. To look at it: $(BIN)/python -m http.server -d build/site"

# ---- the checks ---------------------------------------------------------------------------

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

# Ranks import minidist in each pool: where an image forbids bytecode, each would compile it.
PY := PYTHONDONTWRITEBYTECODE= $(BIN)/python
export WORKERS ?= 2

CXX ?= g++
compiler:
	@command -v $(CXX) > /dev/null || { echo "make test needs a C++ compiler, for DeepSpeed: \
	install g++ (Debian: apt install g++; macOS: xcode-select --install), set CXX, or: \
	make test WITHOUT_TOOLS=1"; exit 1; }

LESSONS := notebooks/*.ipynb notebooks/museum/*.ipynb notebooks/traces/*.ipynb

# What nbval compares, and how long a cell may take.
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=120 \
    --nbval-sanitize-with=notebooks/sanitize.cfg
PYTEST := $(PY) -m pytest --color=no -p no:cacheprovider

# Two files at a time. Notebooks come first, since they take longest. Beside another one a measured
# time says little: one that misses prints a sentence (MINIDIST_TIMING=soft). Of the solutions those
# run whose lesson has changed. A test that fails runs once more, unless it hung; if it passes then,
# it is listed at the end as RERUN: a fault to mend. To run other tests: make test TEST_ARGS="..."
test: $(if $(WITHOUT_TOOLS),lint,compiler lint $(TOOLS))
	MINIDIST_TIMING=soft $(PYTEST) $(NBVAL) -n $(WORKERS) --dist=loadfile \
	    --no-loadscope-reorder --max-worker-restart=0 --reruns=1 --rerun-except='[Tt]imeout' \
	    --rerun-exclude-path=notebooks --rerun-show-tracebacks -raR --durations=20 \
	    $(or $(TEST_ARGS),$(LESSONS) $$($(BIN)/python tests/changed.py) tests)

NOTEBOOKS ?= $(LESSONS)

timing: $(TOOLS)
	MINIDIST_TIMING= $(PYTEST) $(NBVAL) $(NOTEBOOKS)

# Chromium comes from the system: apt install chromium. Without it the tests are skipped.
browser: $(TEST) site
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	$(PYTEST) tests/test_browser*.py -m browser -rP $(TEST_ARGS)

# Another seed each time. To see a failure again: make soak SEED=...
SEED := $(or $(SEED),$(shell date +%s))

soak: $(TOOLS)  # plans and the doctor are held against some of real_tools
	@echo "seed: $(SEED)"
	MINIDIST_SEED=$(SEED) $(PYTEST) tests -m soak -n $(WORKERS) --dist=worksteal \
	    --hypothesis-seed=$(SEED) --durations=10 $(TEST_ARGS)
