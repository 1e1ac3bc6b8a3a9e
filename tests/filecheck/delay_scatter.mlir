// RUN: %opt %s -p 'delay-scatter{width=2}' | %filecheck %s

// The additions of a block come between the arithmetic of the next; the last block's follow the loop.

func.func @loop(%start: i64, %stop: i64, %map: memref<?xi32>, %x: memref<?xf64>, %y: memref<?xf64>) {
  %values = memref.alloca() {alignment = 64 : i64} : memref<1x2xf64>
  %first = arith.index_cast %start : i64 to index
  %end = arith.index_cast %stop : i64 to index
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  scf.for %block = %first to %end step %c2 {
    %gathered = vector.load %x[%block] : memref<?xf64>, vector<2xf64>
    %square = arith.mulf %gathered, %gathered : vector<2xf64>
    %cube = arith.mulf %square, %gathered : vector<2xf64>
    vector.store %cube, %values[%c0, %c0] : memref<1x2xf64>, vector<2xf64>
    %rest = arith.subi %end, %block : index
    %whole = arith.cmpi eq, %rest, %c2 : index
    scf.if %whole {
      %all = vector.load %values[%c0, %c0] : memref<1x2xf64>, vector<2xf64>
      %t0 = memref.load %map[%block] : memref<?xi32>
      %i0 = arith.index_cast %t0 : i32 to index
      %v0 = vector.extract %all[0] : f64 from vector<2xf64>
      %b0 = memref.load %y[%i0] : memref<?xf64>
      %a0 = arith.addf %b0, %v0 : f64
      memref.store %a0, %y[%i0] : memref<?xf64>
      %next = arith.addi %block, %c1 : index
      %t1 = memref.load %map[%next] : memref<?xi32>
      %i1 = arith.index_cast %t1 : i32 to index
      %v1 = vector.extract %all[1] : f64 from vector<2xf64>
      %b1 = memref.load %y[%i1] : memref<?xf64>
      %a1 = arith.addf %b1, %v1 : f64
      memref.store %a1, %y[%i1] : memref<?xf64>
    } else {
      scf.for %cell = %c0 to %rest step %c1 {
        %entity = arith.addi %cell, %block : index
        %t = memref.load %map[%entity] : memref<?xi32>
        %i = arith.index_cast %t : i32 to index
        %v = memref.load %values[%c0, %cell] : memref<1x2xf64>
        %b = memref.load %y[%i] : memref<?xf64>
        %a = arith.addf %b, %v : f64
        memref.store %a, %y[%i] : memref<?xf64>
      }
    }
  }
  func.return
}

// CHECK:       %[[ZERO:.*]] = arith.constant -0.000000e+00 : f64
// CHECK:       %[[ZEROS:.*]] = vector.broadcast %[[ZERO]] : f64 to vector<2xf64>
// CHECK:       vector.store %[[ZEROS]], %values
// CHECK:       scf.for %block = %first to %end step %c2 {
// CHECK:         %[[EARLIER:.*]] = arith.subi %block, %{{.*}} : index
// CHECK-NEXT:    %[[BEFORE:.*]] = arith.maxsi %[[EARLIER]], %first : index
// CHECK:         vector.load %x[%block]
// CHECK:         memref.load %map[%[[BEFORE]]]
// CHECK:         memref.store %{{.*}}, %y
// CHECK:         %square = arith.mulf
// CHECK:         arith.addi %[[BEFORE]], %c1 : index
// CHECK:         memref.store %{{.*}}, %y
// CHECK:         %cube = arith.mulf
// CHECK-NEXT:    vector.store %cube, %values
// CHECK-NOT:     memref.store
// CHECK:       }
// CHECK:       %[[SOME:.*]] = arith.cmpi sgt, %{{.*}}, %{{.*}} : index
// CHECK-NEXT:  scf.if %[[SOME]] {
// CHECK:         scf.for %{{.*}} = %c0 to %{{.*}} step %c1 {
// CHECK:           memref.store %{{.*}}, %y
