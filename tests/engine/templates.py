"""Chat templates in the manner of the model families that call tools; written for these tests."""

from __future__ import annotations

_TURNS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.content %}{{- m.content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}CALL{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

HERMES_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools:\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}"
    '{{- \'Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n\' }}{%- endif %}'
) + _TURNS.replace(
    "CALL",
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}",
)

LLAMA_TEMPLATE = (
    '{%- if tools is not none %}{{- \'Answer with {"name": function, "parameters": {...}} or <|python_tag|>\\n\' }}'
    "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}"
) + _TURNS.replace(
    "CALL",
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    "{{- '{\"name\": \"' + call.function.name + '\", \"parameters\": ' + call.function.arguments | tojson + '}' }}",
)

MISTRAL_TEMPLATE = (
    "{%- if tools is defined and tools is not none %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}"
    "{%- endif %}"
) + _TURNS.replace(
    "CALL",
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}"
    "{{- '[TOOL_CALLS][' + call.function | tojson + ']' }}",
)

TEMPLATES = {"hermes": HERMES_TEMPLATE, "llama": LLAMA_TEMPLATE, "mistral": MISTRAL_TEMPLATE}
