"""Tools of the kernels' developers: compile for every GPU, read the code, bound its speed."""
