//! vLLM V1's prefix cache and scheduler, pure: time is an argument, nothing waits.
