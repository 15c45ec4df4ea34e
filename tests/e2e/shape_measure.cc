#include "tests/e2e/shape_measure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace dlo {
namespace {

using Rgb = std::array<double, 3>;  // 0..255
using NamedColor = std::pair<const char*, Rgb>;

constexpr std::array<NamedColor, 8> kColors = {{{"red", {220, 30, 30}},
                                                {"green", {40, 190, 60}},
                                                {"blue", {50, 90, 250}},
                                                {"yellow", {250, 225, 40}},
                                                {"purple", {150, 50, 200}},
                                                {"cyan", {40, 215, 225}},
                                                {"white", {250, 250, 250}},
                                                {"orange", {250, 140, 20}}}};
constexpr std::array<NamedColor, 5> kBackgrounds = {{{"black", {5, 5, 5}},
                                                     {"white", {245, 245, 245}},
                                                     {"gray", {125, 125, 125}},
                                                     {"dark blue", {12, 16, 85}},
                                                     {"dark green", {8, 60, 25}}}};
constexpr int kBorder = 4;                  // pixels
constexpr double kForegroundDistance = 60;  // in 8-bit RGB from the background
constexpr double kMovingDistance = 0.08;    // of the frame's side
constexpr double kDiagonalShare = 0.41;     // tan(22.5 degrees)
constexpr double kGrowth = 1.5;

double Distance(const Rgb& a, const Rgb& b) {
  return std::hypot(a[0] - b[0], a[1] - b[1], a[2] - b[2]);
}

template <size_t n>
std::string Nearest(const Rgb& color, const std::array<NamedColor, n>& table) {
  return std::min_element(table.begin(), table.end(),
                          [&](const NamedColor& a, const NamedColor& b) {
                            return Distance(color, a.second) < Distance(color, b.second);
                          })
      ->first;
}

double Quantile(std::vector<double> values, double q) {
  auto nth = values.begin() + static_cast<ptrdiff_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

Rgb Median(const std::vector<Rgb>& colors) {
  Rgb median;
  for (int c = 0; c < 3; ++c) {
    std::vector<double> channel;
    channel.reserve(colors.size());
    for (const Rgb& color : colors) channel.push_back(color[c]);
    median[c] = Quantile(std::move(channel), 0.5);
  }
  return median;
}

double Mean(const std::vector<double>& values, size_t first, size_t count) {
  double sum = 0;
  for (size_t i = first; i < first + count; ++i) sum += values[i];
  return sum / static_cast<double>(count);
}

std::string Motion(const ShapeMeasure& m) {
  const double x = std::abs(m.dx), y = std::abs(m.dy), far = std::max(x, y);
  if (far > kMovingDistance) {
    std::string motion;
    if (y > kDiagonalShare * far) motion = m.dy > 0 ? "down" : "up";
    if (x > kDiagonalShare * far) {
      if (!motion.empty()) motion += " ";
      motion += m.dx > 0 ? "right" : "left";
    }
    return motion;
  }
  if (m.growth > kGrowth) return "growing";
  if (m.growth < 1 / kGrowth) return "shrinking";
  return "still";
}

}  // namespace

ShapeMeasure MeasureShape(absl::Span<const float> rgb, int num_frames, int height, int width) {
  auto pixel = [&](int t, int y, int x) {
    const float* p = &rgb[((int64_t{t} * height + y) * width + x) * 3];
    return Rgb{p[0] * 255.0, p[1] * 255.0, p[2] * 255.0};
  };

  std::vector<Rgb> border;
  for (int t = 0; t < num_frames; ++t) {
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        if (std::min({y, x, height - 1 - y, width - 1 - x}) < kBorder) {
          border.push_back(pixel(t, y, x));
        }
      }
    }
  }
  const Rgb background = Median(border);

  ShapeMeasure m;
  m.background = Nearest(background, kBackgrounds);
  std::vector<Rgb> shape;
  std::vector<double> distance, center_x, center_y, area;
  for (int t = 0; t < num_frames; ++t) {
    double n = 0, sum_x = 0, sum_y = 0;
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        const Rgb color = pixel(t, y, x);
        const double d = Distance(color, background);
        if (d <= kForegroundDistance) continue;
        shape.push_back(color);
        distance.push_back(d);
        n += 1, sum_x += x, sum_y += y;
      }
    }
    area.push_back(n);
    center_x.push_back(sum_x / n / width);
    center_y.push_back(sum_y / n / height);
  }
  const auto [smallest, largest] = std::minmax_element(area.begin(), area.end());
  if (*largest < 20) return m;

  // Pixels of the shape's blurred rim lie between the two colours.
  const double inner = Quantile(distance, 0.3);
  std::vector<Rgb> core;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (distance[i] >= inner) core.push_back(shape[i]);
  }
  m.color = Nearest(Median(core), kColors);
  if (*smallest < 8) return m;

  const size_t count = static_cast<size_t>(std::max(1, num_frames / 6));
  const size_t last = area.size() - count;
  m.dx = Mean(center_x, last, count) - Mean(center_x, 0, count);
  m.dy = Mean(center_y, last, count) - Mean(center_y, 0, count);
  m.growth = Mean(area, last, count) / Mean(area, 0, count);
  m.motion = Motion(m);
  return m;
}

}  // namespace dlo
