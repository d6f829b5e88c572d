"""What people see: pictures and reports."""
