"""The interface of Mooncake's Python client, on Layercake."""
