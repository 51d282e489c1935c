"""The session contract as its callers see it: JSON bodies and the HTTP client."""
