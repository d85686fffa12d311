"""A place of verl's that has no counterpart here: importing it is refused with what to write."""

FIX = "the code interpreter here is verl.tools.code_interpreter, in a sandbox of its own"

raise ImportError(f"verl.tools.sandbox_fusion_tools is not in this version: {FIX}")
