"""A module of verl that is not in this version: importing it raises an error with the fix."""

FIX = "the code interpreter here is verl.tools.code_interpreter, in a sandbox of its own"

raise ImportError(f"verl.tools.sandbox_fusion_tools is not in this version: {FIX}")
