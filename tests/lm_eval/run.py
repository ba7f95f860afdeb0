"""lm-eval against a running server, by /v1/completions with log-probabilities and echo. Not part of ./test: what it
pulls in is near 900 MB.

    python3 -m venv VENV && VENV/bin/pip install -r tests/lm_eval/requirements.txt
    cargo run -p lockstep-testkit --example make_fixtures -- DIR chain
    cargo run -p lockstep -- serve --model DIR/chain --port 8000
    VENV/bin/python tests/lm_eval/run.py http://127.0.0.1:8000 DIR/chain

The fixture's answers are known, so the accuracy must be 1; another model's folder (it must hold a tokenizer.json)
works as well, with other tasks.
"""

import os
import pathlib
import sys

# Everything is local: the task file beside this script and the tokenizer in the model's folder.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lm_eval
from lm_eval.tasks import TaskManager

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: run.py http://HOST:PORT MODEL_FOLDER")
    origin, folder = sys.argv[1], pathlib.Path(sys.argv[2]).absolute()
    os.chdir(pathlib.Path(__file__).parent)
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{origin}/v1/completions",
            "model": folder.name,
            "tokenizer": str(folder),
            "tokenizer_backend": "huggingface",
            "num_concurrent": 8,
            "max_length": 512,
        },
        tasks=["scripts"],
        task_manager=TaskManager(include_path="."),
        bootstrap_iters=0,
    )["results"]["scripts"]
    print({name: value for name, value in results.items() if name.startswith("acc")})
    sys.exit(0 if results["acc,none"] == 1 else 1)
