"""Plugins that are single files: loads one as a module whose name no other module can have.

    my_plugin.py --load_file--> module mmdeploy_llm_file_my_plugin_1f3a...  (path and content)

A file that has changed is another module, so a new engine gets the new code and an old one keeps
its own. Another process that is told the path and the name loads the same module, or finds that the
file has changed. Nothing here imports torch.
"""

from .loading import check_file, file_of, load_file, load_named

__all__ = ["check_file", "file_of", "load_file", "load_named"]
