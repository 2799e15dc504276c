"""What `make demo` needs beside the library."""
