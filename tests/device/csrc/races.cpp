// Two accesses to the same bytes, one of them a write, have to be ordered: by being on one stream, by events, or by a host
// that waited in between. What is not ordered is a race, whoever wins it today. (The same idea as torch.cuda._sanitizer's
// and compute-sanitizer's; vector clocks after Mattern, "Virtual time and global states of distributed systems", 1989.)
#include "machine.h"

#include <algorithm>

namespace strict {

namespace {

std::vector<std::string>& reports() {
  static auto* kept = new std::vector<std::string>;
  return *kept;
}

constexpr size_t kMostReports = 50;

bool is_before(const Access& access, const Clock& follows) { return follows[access.stream] >= access.number; }

std::string name(const Access& access) {
  return std::string(access.writes ? "write" : "read") + " by " + access.what + " on stream " +
         std::to_string(access.stream % kStreams) + " of device " + std::to_string(access.stream / kStreams);
}

}  // namespace

void report(const std::string& what) {
  if (reports().size() < kMostReports) {
    reports().push_back(what);
  }
}

std::vector<std::string> take_reports() {
  std::vector<std::string> taken;
  taken.swap(reports());
  return taken;
}

void note(History& history, Access access, const Clock& follows) {
  auto& known = history.accesses;
  for (const Access& other : known) {
    const bool overlap = other.start < access.stop && access.start < other.stop;
    if (overlap && (other.writes || access.writes) && !is_before(other, follows)) {
      report("race: " + name(access) + " is not ordered after the " + name(other));
    }
  }
  // What the new access covers, and what is like it, needs no note of its own: who follows this one follows those.
  known.erase(
      std::remove_if(
          known.begin(),
          known.end(),
          [&](const Access& other) {
            const bool covered = access.start <= other.start && other.stop <= access.stop;
            const bool replaced = access.writes || (other.stream == access.stream && !other.writes);
            return covered && replaced && is_before(other, follows);
          }),
      known.end());
  known.push_back(std::move(access));
}

void note_end(History& history, const Clock& follows, const std::string& what) {
  for (const Access& other : history.accesses) {
    if (!is_before(other, follows)) {
      report("given up while in use: " + what + " is not ordered after the " + name(other));
    }
  }
  history.accesses.clear();
}

}  // namespace strict
