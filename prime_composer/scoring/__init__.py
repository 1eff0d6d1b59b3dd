"""A plugin for vLLM's server: a teacher's scores, hidden states and output head in binary.

- ``wire``: request and response as bytes, for both sides
- ``kinds``: what a row of a response can hold, one object per kind for both sides
- ``worker``: where vLLM has the hidden states of a prompt; the kinds compute their arrays there
- ``runners``: how vLLM's two model runners come to it
- ``plugin``: the entry points; nothing happens unless VLLM_PLUGINS names ``prime_composer``
- ``endpoint``: the routes of the API server
- ``requests``: what is asked, checked against the server's limits
- ``engine``: the rows of a request from vLLM's engine, a few steps' work at a time
- ``head``: the model's output head, in pieces
- ``shared_vocabulary``: ids that one output head has and another lacks

Of other parts of prime_composer only the contract's ``Scores`` is imported here. Clients import
``wire``, the kinds and ``shared_vocabulary`` alone.
The plugin runs in vLLM 0.26 to 0.33.
"""
