// Where the checkout and the build are: the one object of a test that differs between builds, so
// that a compiler cache may share all others.
#pragma once

namespace gatefold {

extern const char* const kSourceFolder;
extern const char* const kProgramFile;
/// mpirun with its options, words separated by spaces.
extern const char* const kMpirun;

}  // namespace gatefold
