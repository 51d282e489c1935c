"""Complete runs that a user can start by name: settings, data and pages."""
