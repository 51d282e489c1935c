"""mini-SWE-agent learns to mend real projects: rows of SWE-bench, SWE-Gym and SWE-smith, or a folder of projects of yours."""
