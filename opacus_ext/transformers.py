"""
Imported to use ``model.set_attn_implementation("re_attention")`` before
``make_private``, where transformers was imported after opacus_ext.

Example:
    >>> import opacus_ext.transformers
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1))
    >>> model.set_attn_implementation("re_attention")
"""

try:
    import transformers.modeling_utils  # noqa: F401
except ImportError as error:
    raise ImportError(
        "opacus_ext.transformers takes transformers: pip install opacus_ext[trainer]"
    ) from error

from opacus_ext.registry import extend_transformers

extend_transformers()
