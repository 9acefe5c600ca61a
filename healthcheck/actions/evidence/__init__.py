"""Keep what a person needs to understand an alert, and nothing that is none of our business."""
