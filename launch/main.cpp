#include "launch/program.h"

int main(int argc, char** argv) { return gatefold::run_program(argc, argv); }
