// peak_rss FILE COMMAND ARGUMENT…: runs the command and appends a line with its peak resident
// memory in KiB to FILE.RANK.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

int main(int argc, char** argv) {
  if (argc < 3) return 64;
  const pid_t child = ::fork();
  if (child < 0) return 71;
  if (child == 0) {
    ::execvp(argv[2], argv + 2);
    ::_exit(127);
  }
  int status = 0;
  rusage usage{};
  if (::wait4(child, &status, 0, &usage) != child) return 70;
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const std::string path = std::string(argv[1]) + "." + (rank != nullptr ? rank : "0");
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) return 74;
  const bool written = std::fprintf(file, "%ld\n", usage.ru_maxrss) > 0;
  if (std::fclose(file) != 0 || !written) return 74;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
