"""Code execution as a service: SandboxFusion's `POST /run_code` over warm sandboxes of this machine. `python -m psrl.sandbox_server`."""
