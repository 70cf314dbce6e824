"""Other people's libraries: each module needs its extra, and is loaded only where that library is in use."""
