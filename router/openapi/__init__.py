"""The gateway described as an OpenAPI document, for clients and fuzzers."""
