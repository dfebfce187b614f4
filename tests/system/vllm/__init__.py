"""vLLM under the target; `make vllm-check` has an environment of its own for these tests."""
