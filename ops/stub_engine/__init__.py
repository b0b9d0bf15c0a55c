"""A server with the HTTP calls of an inference engine (vLLM 0.33, SGLang 0.5.23), over the built-in policy and engine."""
