"""JavaScript clients: runs tests/node against the servers of this session.

LOCKSTEP_NODE is a Node.js that the packages accept and LOCKSTEP_NODE_TESTS the folder with the tests and their
installed packages; ./test sets both.
"""

import os
import subprocess

import conftest


def test_openai(servers):
    server = servers("chain_tools", 1)
    node, folder = conftest.required("LOCKSTEP_NODE"), conftest.required("LOCKSTEP_NODE_TESTS")
    environment = {**os.environ, "LOCKSTEP_BASE_URL": server.base_url, "LOCKSTEP_MODEL": server.model}
    ran = subprocess.run(
        [node, "--test", "--test-reporter=spec", "openai.test.js"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # A run that finds no test also ends with 0.
    assert "\u2139 pass 0" not in ran.stdout and "pass " in ran.stdout, ran.stdout
