"""Choose the schedule that a loop runs with: measured on the real mesh and device, remembered."""
